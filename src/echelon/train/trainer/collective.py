"""The Trainer of a store without servers: gradients are summed over the group during backward, weights updated here.

A process that trains alone has nothing to sum: a step is the optimizer's own, without copies, and a CUDA graph can
record it (`update`). In a group, the gradients of a bucket, times the samples of the batch, are reduced as soon as
autograd has finished the last of them, in the same order on all ranks. `step` sums the step's vector and divides the
gradients by the samples of all: the mean over the joined batch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS

from echelon.errors import UsageError
from echelon.kvstore.collective.process_group import Reduction
from echelon.kvstore.collective.store import CollectiveStore
from echelon.train.trainer.flat_buckets import make_flat_buckets
from echelon.train.trainer.group import GroupTrainer, StepTotals
from echelon.train.trainer.optimizer_state import ShardedOptimizer, check_elementwise

ABSENT = -1  # the version of a gradient that does not exist


class CollectiveTrainer(GroupTrainer, store=CollectiveStore):
    """Keeps the models of a group equal."""

    kvstore: CollectiveStore

    def _start(self) -> None:
        if isinstance(self.optimizer, LBFGS):
            raise UsageError("LBFGS needs a closure that computes the loss again; a Trainer does not have one")
        super()._start()
        self._reductions: list[Reduction] = []  # of the current step, in the order of the buckets
        self._versions: dict[str, int] = {}  # of gradients that were sent
        self._given: set[str] = set()  # parameters whose gradients were sent
        self._halt_flag: tuple[Tensor, torch.cuda.Event] | None = None  # of the last step, being copied to the host
        self._sharded: ShardedOptimizer | None = None
        self.capturable = self._group.size == 1
        self.shards_optimizer = self.kvstore.sharded
        if self.shards_optimizer:
            check_elementwise(self.optimizer)
        if self._group.size > 1:
            self._join()

    def zero_grad(self) -> None:
        """Discard gradients that were not sent yet."""
        super().zero_grad()
        for name in self._parameters:
            if name in self._versions:
                self._versions[name] = ABSENT
            elif self._buckets:
                self._bucket_of[name].arrived.discard(name)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load weights and buffers into the model; those of rank 0 count. All workers call it."""
        super().load_weights(weights)
        self._broadcast_model()

    def optimizer_state(self) -> dict[str, Tensor]:
        """Return the optimizer's state as whole tensors on the CPU. With `shards_optimizer`, all workers call it."""
        return super().optimizer_state() if self._sharded is None else self._sharded.state()

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """Load a state. All workers call it with the same state."""
        if self._sharded is None:
            super().load_optimizer_state(state)
        else:
            self._sharded.load(state)

    # --- in a group

    def _join(self) -> None:
        self._agree_on_parameters()
        self._broadcast_model()
        self._buckets = make_flat_buckets(self._parameters, self._group.size)
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.parameters}
        if self.shards_optimizer:
            self._sharded = ShardedOptimizer(self._group, self.optimizer, self._buckets)
        self.kvstore.on_retire = self._take_part_without_data
        for name, parameter in self._parameters.items():
            hook = parameter.register_post_accumulate_grad_hook(self._grad_hook(name))
            self._hooks.append(hook)

    def _grad_hook(self, name: str) -> Any:
        bucket = self._bucket_of[name]

        def ready(parameter: Tensor) -> None:
            if self._accumulating or not self._overlap or self._samples_seen is None:
                return
            if name in bucket.arrived:
                raise self._second_backward_error()
            self._check_gradient(name, parameter.grad)
            bucket.arrived.add(name)
            while len(self._reductions) < len(self._buckets) and self._buckets[len(self._reductions)].is_complete:
                self._reduce_next(self._samples_seen)

        return ready

    def _reduce_next(self, samples: int) -> None:
        """Start to reduce the next bucket."""
        bucket = self._buckets[len(self._reductions)]
        bucket.collect()
        bucket.gradients.mul_(samples)
        for name, parameter in bucket.parameters.items():
            self._versions[name] = _version(parameter.grad)
            if parameter.grad is not None:
                self._given.add(name)
        reduce = self._group.all_reduce if self._sharded is None else self._group.reduce_scatter
        self._reductions.append(reduce(bucket.gradients))

    @property
    def _gradients_sent(self) -> bool:
        return bool(self._reductions)

    def _step(self, samples: int) -> None:
        if self._group.size == 1:
            super()._step(samples)
            return
        self._check_unchanged()
        self._check_frozen()
        for name, parameter in self._parameters.items():
            if name not in self._bucket_of[name].arrived:
                self._check_gradient(name, parameter.grad)
        self._receive_halt(self._take_part(samples, active=True).halt)

    def _take_part(self, samples: int, *, active: bool) -> StepTotals:
        while len(self._reductions) < len(self._buckets):
            self._reduce_next(samples)
        given = self._given
        pending = self._reduce_step_vector(samples, active, (name in given for name in self._names))
        began = time.perf_counter()
        reduced = [reduction.result() for reduction in self._reductions]
        totals = StepTotals.of(pending.result())
        self.wait_s += time.perf_counter() - began
        used = given
        if len(given) < len(self._names):  # only then can another process have gradients that this one does not have
            used = {name for name, count in zip(self._names, totals.used.tolist(), strict=True) if count}
        if self._sharded is None:
            self._update(reduced, totals.samples, used)
        else:
            self._sharded.update(reduced, totals.samples, used)
        self._begin_step()
        return totals

    def _update(self, sums: Sequence[Tensor], divisor: Tensor, used: set[str]) -> None:
        """Use the memory of the sums as the gradients of the parameters in `used`, and run the optimizer."""
        for bucket, total in zip(self._buckets, sums, strict=True):
            total /= divisor
            for name, parameter in bucket.parameters.items():
                parameter.grad = bucket.place(total, name).to(parameter.dtype) if name in used else None
        self._guarded_optimizer.step()

    def _begin_step(self) -> None:
        self._clear_gradients()
        self._reductions.clear()
        self._versions.clear()
        self._given = set()
        for bucket in self._buckets:
            bucket.arrived.clear()

    def _receive_halt(self, total: Tensor) -> None:
        """Pass the sum of the halt flags to the store, on all ranks after the same step.

        On a GPU that is one step later, when the sum is on the host without waiting for the device.
        """
        if total.device.type == "cpu":
            self.kvstore.receive_flags(float(total))
            return
        if self._halt_flag is not None:
            flag, copied = self._halt_flag
            copied.synchronize()
            self.kvstore.receive_flags(float(flag))
        copied = torch.cuda.Event()
        flag = total.to("cpu", non_blocking=True)
        copied.record()
        self._halt_flag = flag, copied

    def _check_unchanged(self) -> None:
        """Raise UsageError if a gradient was changed after it was sent: the change would have no effect."""
        for name, version in self._versions.items():
            if _version(self._parameters[name].grad) != version:
                raise self._changed_gradient_error(name)


def _version(gradient: Tensor | None) -> int:
    """Return torch's version counter, which grows with every write."""
    return ABSENT if gradient is None else gradient._version
