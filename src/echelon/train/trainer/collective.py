"""The Trainer of a store without servers: gradients are summed over the group during backward, weights updated here.

Alone there is nothing to sum: a step is the optimizer's own, without copies, and a CUDA graph can record it (`update`).
With others a bucket's gradients, times the samples of the batch, are on their way as soon as autograd has finished the
last of them, in the same order everywhere. `step` adds a short vector (samples, flags, which parameters were used) and
divides by all samples: the mean over the joined batch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS

from echelon.errors import UsageError
from echelon.kvstore.arguments import is_finite
from echelon.kvstore.collective.process_group import Reduction
from echelon.kvstore.collective.store import CollectiveStore
from echelon.kvstore.state_files import by_key
from echelon.train.trainer.base import Trainer
from echelon.train.trainer.flat_buckets import FlatBucket, make_flat_buckets, names_of
from echelon.train.trainer.replicas import Parts, Replica, Whole, check_elementwise, load_state, state_of

SAMPLES, HALT, ACTIVE, USED = 0, 1, 2, 3  # places in a step's vector; from USED on, one a parameter
ABSENT = -1  # the version of a gradient that is not there


class CollectiveTrainer(Trainer):
    """Keeps the models of a group alike."""

    kvstore: CollectiveStore

    def _start(self) -> None:
        if isinstance(self.optimizer, LBFGS):
            raise UsageError("LBFGS needs a closure that computes the loss again and again: a Trainer has none")
        self._group = self.kvstore.group
        self._buckets: list[FlatBucket] = []
        self._launched: list[Reduction] = []  # of the step that is being made, in the buckets' order
        self._versions: dict[str, int] = {}  # of gradients that have left
        self._given: set[str] = set()  # parameters whose gradients have left
        self._arrived: set[str] = set()
        self._flags: tuple[Tensor, torch.cuda.Event] | None = None  # of the step before, on their way to the host
        if self.kvstore.sharded:
            check_elementwise(self.optimizer)
        if self._group.size > 1:
            self._join()

    @property
    def lock_step(self) -> bool:
        """Every step waits for all."""
        return True

    @property
    def capturable(self) -> bool:
        """Alone, a step meets nobody."""
        return self._group.size == 1

    def update(self) -> None:
        """The optimizer's step; alone only."""
        if not self.capturable:
            super().update()
        self.optimizer.step()

    def sync(self) -> None:
        """A step that is over is over."""

    def refresh(self) -> None:
        """The weights are here, and as new as they can be."""

    def zero_grad(self) -> None:
        """Forget gradients that have not left."""
        self._carried = 0
        for name, parameter in self._parameters.items():
            parameter.grad = None
            if name in self._versions:
                self._versions[name] = ABSENT
            elif name in self._arrived:
                self._arrived.remove(name)
                self._missing[self._bucket_of[name].index] += 1

    def average_buffers(self) -> None:
        """Set floating-point buffers (BatchNorm's statistics) to their mean over the group. All must call it."""
        if not self._buffers or self._group.size == 1:
            return
        mine = torch.cat([buffer.detach().reshape(-1).float() for buffer in self._buffers])
        mean = self._group.all_reduce(mine).result() / self._group.size
        for buffer, part in zip(self._buffers, torch.split(mean, [b.numel() for b in self._buffers]), strict=True):
            buffer.copy_(part.view_as(buffer))

    def over_devices(self, sums: Tensor) -> Tensor:
        """The sums of all devices of the group, on the CPU. All of them call it after the same step."""
        return self._group.all_reduce(sums.clone()).result().cpu()

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Put weights and buffers into the model; rank 0's count. All workers call it."""
        self.model.load_state_dict(weights)
        self._spread()

    def optimizer_state(self) -> dict[str, Tensor]:
        """The optimizer's state as whole tensors on the CPU. All workers call it."""
        if self._buckets:
            return self._replica.state()
        return state_of(self.optimizer, self._parameters)

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up a state. All workers call it, with the same."""
        if self._buckets:
            self._replica.load(state)
        else:
            load_state(self.optimizer, self._parameters, by_key(state))

    # --- with others

    def _join(self) -> None:
        shapes = ", ".join(f"{name} {tuple(p.shape)} {p.dtype}" for name, p in self._parameters.items())
        self._group.check_same("the model's parameters", shapes)
        self._spread()
        self._buckets = make_flat_buckets(self._parameters, self._group.size)
        self._bucket_of = names_of(self._buckets)
        self._missing = [len(bucket.parameters) for bucket in self._buckets]
        kind = Parts if self.kvstore.sharded else Whole
        self._replica: Replica = kind(self._group, self.optimizer, self._buckets)
        self.kvstore.on_retire = self._stand_by
        for name, parameter in self._parameters.items():
            hook = parameter.register_post_accumulate_grad_hook(self._grad_hook(name))  # type: ignore[no-untyped-call]
            self._hooks.append(hook)

    def _spread(self) -> None:
        """Rank 0's weights and buffers, everywhere."""
        self._group.broadcast([*self.model.parameters(), *self.model.buffers()])

    def _grad_hook(self, name: str) -> Any:
        bucket = self._bucket_of[name]

        def ready(parameter: Tensor) -> None:
            if self._accumulating or not self._overlap or self._seen is None:
                return
            if name in self._arrived:
                raise self._second_backward()
            self._check(name, parameter)
            self._arrived.add(name)
            self._missing[bucket.index] -= 1
            while len(self._launched) < len(self._buckets) and not self._missing[len(self._launched)]:
                self._launch(self._seen)

        return ready

    def _launch(self, samples: int) -> None:
        """Send the next bucket on its way."""
        bucket = self._buckets[len(self._launched)]
        bucket.collect()
        bucket.gradients.mul_(samples)
        for name, parameter in bucket.parameters.items():
            self._versions[name] = _version(parameter.grad)
            if parameter.grad is not None:
                self._given.add(name)
        self._launched.append(self._replica.reduce(bucket))

    @property
    def _have_left(self) -> bool:
        return bool(self._launched)

    def _step(self, samples: int) -> None:
        if self._group.size == 1:
            for name, parameter in self._parameters.items():
                self._check(name, parameter)
            self.update()
            self._forget()
            return
        self._check_unchanged()
        self._check_frozen()
        for name, parameter in self._parameters.items():
            if name not in self._arrived:
                self._check(name, parameter)
        self._hear(self._round(samples, active=True))

    def _round(self, samples: int, active: bool) -> Tensor:
        """What all do in a step; returns the vector's sums."""
        while len(self._launched) < len(self._buckets):
            self._launch(samples)
        given = self._given
        vector = [float(samples), self.kvstore.halt_flag, float(active), *(float(n in given) for n in self._names)]
        totals = self._group.all_reduce(self._on_device(vector))
        began = time.perf_counter()
        reduced = [pending.result() for pending in self._launched]
        found = totals.result()
        self.wait_s += time.perf_counter() - began
        used = given
        if len(given) < len(self._names):  # whoever misses one has to ask whether others had it
            used = {name for name, count in zip(self._names, found[USED:].tolist(), strict=True) if count}
        self._replica.update(reduced, found[SAMPLES], used)
        self._forget()
        return found

    def _on_device(self, vector: list[float]) -> Tensor:
        """From pinned memory, so that the host need not wait until the device is there."""
        if self._group.device.type == "cpu":
            return torch.tensor(vector)
        return torch.tensor(vector, pin_memory=True).to(self._group.device, non_blocking=True)

    def _forget(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None
        self._launched.clear()
        self._versions.clear()
        self._given = set()
        self._arrived.clear()
        self._missing = [len(bucket.parameters) for bucket in self._buckets]

    def _hear(self, totals: Tensor) -> None:
        """Flags are heard at the same step by all: on a GPU one step later, when nobody has to wait for them."""
        if totals.device.type == "cpu":
            self.kvstore.receive_flags(float(totals[HALT]))
            return
        if self._flags is not None:
            flag, there = self._flags
            there.synchronize()
            self.kvstore.receive_flags(float(flag))
        there = torch.cuda.Event()  # type: ignore[no-untyped-call]
        flag = totals[HALT].to("cpu", non_blocking=True)
        there.record()
        self._flags = flag, there

    def _stand_by(self) -> None:
        """No more data here: take part with nothing until nobody has any."""
        while self._round(0, active=False)[ACTIVE]:
            pass

    def _check(self, name: str, parameter: Tensor) -> None:
        if self._check_finite and parameter.grad is not None and not is_finite(parameter.grad):
            raise self._not_finite(name)

    def _check_unchanged(self) -> None:
        """What has been sent cannot be changed any more: say so instead of training with the old values."""
        for name, version in self._versions.items():
            if _version(self._parameters[name].grad) != version:
                raise self._changed_gradient(name)


def _version(gradient: Tensor | None) -> int:
    """It grows when somebody writes."""
    return ABSENT if gradient is None else gradient._version
