"""What Trainers share that sum gradients over a process group: the first agreement, and the vector of every step.

In each step all processes of the group sum one short vector: samples, a request to halt, whether anybody still has
data, and which parameters have gradients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.kvstore.collective.process_group import ProcessGroup, Reduction
from echelon.kvstore.collective.store import CollectiveStore
from echelon.kvstore.multi_device import MultiDeviceStore
from echelon.train.trainer.base import Trainer, flatten, unflatten
from echelon.train.trainer.flat_buckets import FlatBucket


class StepTotals(NamedTuple):
    """The sums of a step's vector over the group."""

    samples: Tensor  # in the batches of all processes
    halt: Tensor  # not 0 if a process asks all to stop
    active: Tensor  # the number of processes that still have data
    used: Tensor  # for each parameter, the number of processes that have a gradient

    @classmethod
    def of(cls, vector: Tensor) -> StepTotals:
        """Return the parts of a vector that `_reduce_step_vector` has summed."""
        return cls(vector[0], vector[1], vector[2], vector[3:])


class GroupTrainer(Trainer, ABC):
    """Keeps the models of a process group equal."""

    kvstore: CollectiveStore | MultiDeviceStore

    def _start(self) -> None:
        self._group: ProcessGroup = self.kvstore.group
        self._buckets: list[FlatBucket] = []

    def average_buffers(self) -> None:
        """Set floating-point buffers (BatchNorm's statistics) to their mean over the group. All must call it."""
        if self._buffers and self._group.size > 1:
            mean = self._group.all_reduce(flatten(self._buffers)).result() / self._group.size
            unflatten(mean, self._buffers)

    def sum_over_devices(self, sums: Tensor) -> Tensor:
        """Return the sums over all devices of the group, on the CPU. All call it after the same step."""
        return self._group.all_reduce(sums.clone()).result().cpu()

    def _agree_on_parameters(self) -> None:
        """Raise UsageError if another process of the group has other parameters."""
        shapes = ", ".join(f"{name} {tuple(p.shape)} {p.dtype}" for name, p in self._parameters.items())
        self._group.check_same("the model's parameters", shapes)

    def _broadcast_model(self) -> None:
        """Copy rank 0's weights (frozen ones, too) and buffers to the whole group."""
        self._group.broadcast([*self.model.parameters(), *self.model.buffers()])

    def _reduce_step_vector(self, samples: int, active: bool, used: Iterable[bool]) -> Reduction:
        """Start to sum the vector of a step over the group."""
        vector = [float(samples), self.kvstore.halt_flag, float(active), *map(float, used)]
        if self._group.device.type == "cpu":
            return self._group.all_reduce(torch.tensor(vector))
        # From pinned memory, so that the host does not wait until the device has finished its earlier work.
        pinned = torch.tensor(vector, pin_memory=True)
        return self._group.all_reduce(pinned.to(self._group.device, non_blocking=True))

    @abstractmethod
    def _take_part(self, samples: int, *, active: bool) -> StepTotals:
        """Do what all processes of the group do in a step. `active`: this process still has data."""

    def _take_part_without_data(self) -> None:
        """Make steps without samples until no process of the group has data."""
        while self._take_part(0, active=False).active:
            pass
