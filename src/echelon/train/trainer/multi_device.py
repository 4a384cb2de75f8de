"""The Trainer of a worker with several devices under a store on servers: one process per device, one push per worker.

In a step, the gradients of the devices, each times its samples, are summed between them. Device 0 has a
`ServerTrainer`: it pushes the mean with the samples of all devices, waits as the scheme requires, and broadcasts the
new weights. A worker therefore has one clock and one line in every report, whatever the number of its devices. The sum
does not overlap with backward, because inside one machine it takes little time.

A CUDA graph cannot record such a step, because device 0 communicates with the servers in the middle of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from echelon.errors import UsageError
from echelon.kvstore.multi_device import MultiDeviceStore
from echelon.kvstore.servers.store import ServerStore
from echelon.train.trainer.group import GroupTrainer
from echelon.train.trainer.servers.sparse_rows import find_tables
from echelon.train.trainer.servers.trainer import ServerTrainer
from echelon.train.trainer.workers.flat_buckets import make_flat_buckets
from echelon.train.trainer.workers.mean_gradients import StepTotals


class MultiDeviceTrainer(GroupTrainer, store=MultiDeviceStore):
    """Keeps the models of a worker's devices equal, and trains device 0's model with the servers."""

    kvstore: MultiDeviceStore
    _updates_here = False

    def _start(self) -> None:
        super()._start()
        self._last_report = math.inf  # `count` need not report, because device 0's ServerTrainer does
        self._agree_on_parameters()
        self._server_trainer: ServerTrainer | None = None  # on device 0
        if self.kvstore.server_store is not None:
            self._server_trainer = self._make_server_trainer(self.kvstore.server_store)
        if tables := find_tables(self.model, self._parameters, self.optimizer):
            raise UsageError(
                f"{tables[0]!r} has sparse gradients, which the devices of a worker in front of servers cannot add: "
                "use sparse=False, one device per worker, or nccl_allreduce"
            )
        self._buckets = make_flat_buckets(self._parameters, self._group.size)
        self._broadcast_trained()
        self.kvstore.on_retire = self._retire
        self.kvstore.before_barrier = self._take_part_without_data
        self.kvstore.after_barrier = self._broadcast_weights  # other workers may have made steps meanwhile

    def _make_server_trainer(self, store: ServerStore) -> ServerTrainer:
        """Return a trainer without hooks, because gradients are complete when it is called."""
        trainer = ServerTrainer(
            self.model,
            self.optimizer,
            store,
            overlap=False,
            average_buffers=bool(self._buffers),
            start_equal=self._start_equal,
            check_finite=self._check_finite,
            max_grad_norm=self.max_grad_norm,
        )
        trainer.remove_hooks()
        return trainer

    # --- the loop

    def refresh(self) -> None:
        """Fetch the newest weights, with the last pushes of all workers. All devices of the worker call it."""
        if self._server_trainer is not None:
            self._server_trainer.refresh()
        self._broadcast_weights()

    def average_buffers(self) -> None:
        """Set floating-point buffers (BatchNorm's statistics) to their mean over all devices. All must call it."""
        if not self._buffers:
            return
        super().average_buffers()
        if self._server_trainer is not None:
            self._server_trainer.average_buffers()
        self._broadcast_weights()  # other workers may have made steps meanwhile
        self._group.broadcast(self._buffers)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load weights and buffers into the model and the servers. All devices of all workers call it."""
        if self._server_trainer is not None:
            self._server_trainer.load_weights(weights)
        else:
            super().load_weights(weights)
        self._broadcast_model()

    def _begin_edit(self) -> None:
        if self._server_trainer is not None:
            self._server_trainer._begin_edit()
        self._broadcast_weights()

    def _publish_weights(self) -> None:
        if self._server_trainer is not None:
            self._server_trainer._publish_weights()
        self._broadcast_model()

    def optimizer_state(self) -> dict[str, Tensor]:
        """Return the servers' state as `<parameter>/<state>`. All devices of the worker call it, and all get it."""
        return self._share_state(self._server_trainer.optimizer_state() if self._server_trainer is not None else {}, 0)

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """Send the servers a state. All devices of all workers call it."""
        if self._server_trainer is not None:
            self._server_trainer.load_optimizer_state(state)
        self._group.barrier()

    # --- a step

    def _step(self, samples: int) -> None:
        for name, parameter in self._parameters.items():
            self._check_gradient(name, parameter.grad)
        self._take_part(samples, active=True)

    def _take_part(self, samples: int, *, active: bool) -> StepTotals:
        used = (parameter.grad is not None for parameter in self._parameters.values())
        totals = StepTotals.of(self._reduce_step_vector(samples, active, used).result().cpu(), self._group.size)
        if totals.active.any():
            sums = self._sum_gradients(samples)
            if self._server_trainer is not None:
                self._push(self._server_trainer, sums, totals)
            self._broadcast_weights()
            self._share_norm()
        self.kvstore.forward_halt(float(totals.halt))
        self.kvstore.share_job_state()
        self.zero_grad()
        return totals

    def _retire(self) -> None:
        self.kvstore.on_retire = self.kvstore.before_barrier = lambda: None
        self._take_part_without_data()

    def _take_part_without_data(self) -> None:
        """Make steps without samples until all devices of the worker are here."""
        self._clock_at_barrier = self.clock
        while self._take_part(0, active=False).active.any():
            pass

    def _sum_gradients(self, samples: int) -> list[Tensor]:
        """Return each bucket's gradients, times the samples of the device, summed over the devices."""
        pending = []
        for bucket in self._buckets:
            bucket.collect([name for name, parameter in bucket.parameters.items() if parameter.grad is not None])
            bucket.gradients.mul_(samples)
            pending.append(self._group.all_reduce(bucket.gradients))
        return [one.result() for one in pending]

    def _push(self, trainer: ServerTrainer, sums: Sequence[Tensor], totals: StepTotals) -> None:
        """Push the mean over the joined batch of the worker's devices, and wait for the new weights."""
        samples = int(totals.samples)
        counts = dict(zip(self._names, totals.used.tolist(), strict=True))
        for bucket, total in zip(self._buckets, sums, strict=True):
            total /= max(1, samples)
            for name, parameter in bucket.parameters.items():
                parameter.grad = bucket.place(total, name).to(parameter.dtype) if counts[name] else None
        trainer.make_step(samples)

    def _broadcast_weights(self) -> None:
        """Copy device 0's weights to all devices, through the gradients' memory, which is free at this point."""
        first = self._server_trainer is not None
        for bucket in self._buckets:
            places = list(bucket.places.values())
            weights = [parameter.detach() for parameter in bucket.parameters.values()]
            if first:
                torch._foreach_copy_(places, weights)
            self._group.broadcast([bucket.gradients])
            if not first:
                torch._foreach_copy_(weights, places)

    def _share_norm(self) -> None:
        """Give all devices the norm of the gradient that device 0's worker clipped."""
        if self.max_grad_norm is not None:
            norm = torch.zeros((), device=self._group.device)
            if self._server_trainer is not None and self._server_trainer.grad_norm is not None:
                norm.copy_(self._server_trainer.grad_norm)
            self._group.broadcast([norm])
            self.grad_norm = norm

    # --- reports

    def report(self) -> None:
        """Write the worker's progress to the event log, on device 0."""
        if self._server_trainer is not None:
            self._server_trainer.report()

    def progress(self) -> dict[str, Any]:
        """Return the worker's progress on device 0, and the device's own on the others."""
        return super().progress() if self._server_trainer is None else self._server_trainer.progress()
