"""The Trainer of a worker with several devices under a store on servers: one process a device, one push a worker.

In a step the devices' gradients, each times its samples, are summed between them. Device 0 has a `ServerTrainer`: it
pushes the mean with the samples of all, waits as the scheme says, and hands the new weights on. So a worker has one
clock and one line in every report, whatever the number of its devices. Nothing overlaps with backward here: what that
would save is the time of a sum inside one machine.

A step cannot be captured: its middle is a talk of device 0 with the servers, which no CUDA graph can hold.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from echelon.kvstore.arguments import dtype_name, is_finite
from echelon.kvstore.multi_device import MultiDeviceStore
from echelon.train.trainer.base import Trainer
from echelon.train.trainer.flat_buckets import FlatBucket, make_flat_buckets
from echelon.train.trainer.server import ServerTrainer

SAMPLES, HALT, ACTIVE, USED = 0, 1, 2, 3  # places in a step's vector; from USED on, one a parameter


class MultiDeviceTrainer(Trainer):
    """Keeps the models of a worker's devices alike, and device 0's in step with the servers."""

    kvstore: MultiDeviceStore

    def _start(self) -> None:
        self._last_report = math.inf  # `count` need not report: the trainer with the servers does
        self._group = self.kvstore.group
        shapes = ", ".join(f"{name} {tuple(p.shape)} {p.dtype}" for name, p in self._parameters.items())
        self._group.check_same("the model's parameters", shapes)
        self._served: ServerTrainer | None = None
        if self.kvstore.server_store is not None:
            self._served = self._join(self.kvstore.server_store)
        elif self._group.device.type == "cpu":
            for parameter in self._parameters.values():  # device 0's are in the store's memory, where all are
                parameter.data = parameter.data.contiguous()
        self._buckets: list[FlatBucket] = make_flat_buckets(self._parameters, self._group.size)
        self._spread()
        self.kvstore.on_retire = self._stand_by

    def _join(self, store: Any) -> ServerTrainer:
        """Device 0's way to the servers. It needs no hooks: it is told when gradients are there."""
        served = ServerTrainer(
            self.model,
            self.optimizer,
            store,
            overlap=False,
            average_buffers=bool(self._buffers),
            check_finite=self._check_finite,
        )
        served.unhook()
        return served

    @property
    def lock_step(self) -> bool:
        """Whether every step waits for all workers."""
        return self.kvstore.type == "dist_sync"

    # --- the loop

    def sync(self) -> None:
        """A step that is over is over."""

    def refresh(self) -> None:
        """Fetch the newest weights, others' last pushes included. All devices of the worker call it."""
        if self._served is not None:
            self._served.refresh()
        self._hand_on()

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self._carried = 0
        for parameter in self._parameters.values():
            parameter.grad = None

    def average_buffers(self) -> None:
        """Set floating-point buffers (BatchNorm's statistics) to their mean over all devices. All must call it."""
        if not self._buffers:
            return
        mine = torch.cat([buffer.detach().reshape(-1).float() for buffer in self._buffers])
        mean = self._group.all_reduce(mine).result() / self._group.size
        for buffer, part in zip(self._buffers, torch.split(mean, [b.numel() for b in self._buffers]), strict=True):
            buffer.copy_(part.view_as(buffer))
        if self._served is not None:
            self._served.average_buffers()
        self._group.broadcast(self._buffers)

    def over_devices(self, sums: Tensor) -> Tensor:
        """The sums of all devices of the group, on the CPU. All of them call it after the same step."""
        return self._group.all_reduce(sums.clone()).result().cpu()

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Put weights and buffers into the model and the servers. All devices of all workers call it."""
        if self._served is not None:
            self._served.load_weights(weights)
        else:
            self.model.load_state_dict(weights)
        self._spread()

    def optimizer_state(self) -> dict[str, Tensor]:
        """The servers' state, `<parameter>/<state>`. All devices of the worker call it, and all get it."""
        state = self._served.optimizer_state() if self._served is not None else {}
        mine = [(name, list(tensor.shape), dtype_name(tensor)) for name, tensor in state.items()]
        for name, shape, dtype in json.loads(self._group.gather_texts(json.dumps(mine))[0]):
            state.setdefault(name, torch.empty(shape, dtype=getattr(torch, dtype)))
        self._group.broadcast(list(state.values()))
        return state

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """Give the servers a state. All devices of all workers call it."""
        if self._served is not None:
            self._served.load_optimizer_state(state)
        self._group.barrier()

    # --- a step

    @property
    def _have_left(self) -> bool:
        return False  # they leave in `step`

    def _step(self, samples: int) -> None:
        for name, parameter in self._parameters.items():
            if self._check_finite and parameter.grad is not None and not is_finite(parameter.grad):
                raise self._not_finite(name)
        self._round(samples, active=True)
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers warn unless step() was called

    def _round(self, samples: int, active: bool) -> bool:
        """What all devices do in a step; whether any of them had something to do."""
        used = [float(parameter.grad is not None) for parameter in self._parameters.values()]
        vector = torch.tensor([float(samples), self.kvstore.halt_flag, float(active), *used])
        found = self._group.all_reduce(vector.to(self._group.device)).result().tolist()
        if found[ACTIVE]:
            sums = self._sums(samples)
            if self._served is not None:
                self._push(self._served, sums, int(found[SAMPLES]), found[USED:])
            self._hand_on()
        self.kvstore.forward_halt(found[HALT])
        self.kvstore.share_job_state()
        self.zero_grad()
        return bool(found[ACTIVE])

    def _sums(self, samples: int) -> list[Tensor]:
        """Each bucket's gradients, times the samples of the device, summed over the devices."""
        pending = []
        for bucket in self._buckets:
            bucket.collect()
            bucket.gradients.mul_(samples)
            pending.append(self._group.all_reduce(bucket.gradients))
        return [one.result() for one in pending]

    def _push(self, served: ServerTrainer, sums: Sequence[Tensor], samples: int, used: Sequence[float]) -> None:
        """The worker's push: the mean over its devices' joined batch."""
        counts = dict(zip(self._names, used, strict=True))
        for bucket, total in zip(self._buckets, sums, strict=True):
            total /= max(1, samples)
            for name, parameter in bucket.parameters.items():
                parameter.grad = bucket.place(total, name).to(parameter.dtype) if counts[name] else None
        served.step(samples)
        served.sync()

    def _hand_on(self) -> None:
        """Device 0's weights, everywhere, through the memory of the gradients, which have left."""
        for bucket in self._buckets:
            places = list(bucket.places.values())
            weights = [parameter.detach() for parameter in bucket.parameters.values()]
            if self._served is not None:
                torch._foreach_copy_(places, weights)
            self._group.broadcast([bucket.gradients])
            if self._served is None:
                torch._foreach_copy_(weights, places)

    def _spread(self) -> None:
        """Device 0's weights and buffers, frozen ones, too, everywhere."""
        self._group.broadcast([*self.model.parameters(), *self.model.buffers()])

    def _stand_by(self) -> None:
        """No more data here: take part with nothing until no device of the worker has any."""
        while self._round(0, active=False):
            pass

    # --- reports

    def report(self) -> None:
        """Write down what the worker has done so far, on device 0."""
        if self._served is not None:
            self._served.report()

    def facts(self) -> dict[str, Any]:
        """What the worker has done so far; on other devices than the first, the device."""
        return super().facts() if self._served is None else self._served.facts()
