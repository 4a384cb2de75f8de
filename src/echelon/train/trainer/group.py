"""What Trainers share that sum gradients over a process group: the first agreement, and the vector of every step."""

from __future__ import annotations

import json
from abc import ABC
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from echelon.kvstore.collective.process_group import ProcessGroup, Reduction
from echelon.kvstore.collective.store import CollectiveStore
from echelon.kvstore.multi_device import MultiDeviceStore
from echelon.kvstore.values import dtype_name
from echelon.train.trainer.base import Trainer, flatten, unflatten
from echelon.train.trainer.start_equal import untrained_tensors
from echelon.train.trainer.workers.flat_buckets import FlatBucket
from echelon.train.trainer.workers.mean_gradients import step_vector


class GroupTrainer(Trainer, ABC):
    """Keeps the models of a process group equal."""

    kvstore: CollectiveStore | MultiDeviceStore

    def _start(self) -> None:
        self._group: ProcessGroup = self.kvstore.group
        self._buckets: list[FlatBucket] = []

    def average_buffers(self) -> None:
        """Set floating-point buffers (BatchNorm's statistics) to their mean over the group. All must call it."""
        if self._buffers and self._group.size > 1:
            self.kvstore.before_barrier()
            unflatten(self._mean(flatten(self._buffers)), self._buffers)

    def _mean(self, flat: Tensor) -> Tensor:
        if isinstance(self.kvstore, CollectiveStore) and self.kvstore.some_have_retired:
            mean: Tensor = self.kvstore.all_reduce(flat)
            return mean
        return self._group.all_reduce(flat).result() / self._group.size

    def sum_over_devices(self, sums: Tensor) -> Tensor:
        """Return the sums over all devices of the group, on the CPU. All call it after the same step."""
        return self._group.all_reduce(sums.clone()).result().cpu()

    def _agree_on_parameters(self) -> None:
        """Raise UsageError if another process of the group has other parameters, or clips to another norm."""
        self._check_same_parameters("the model's parameters", self._parameters)
        self._group.check_same("max_grad_norm", str(self.max_grad_norm))

    def _check_same_parameters(self, what: str, parameters: Mapping[str, nn.Parameter]) -> None:
        shapes = ", ".join(f"{name} {tuple(p.shape)} {p.dtype}{_layout(p)}" for name, p in parameters.items())
        self._group.check_same(what, shapes)

    def _broadcast_trained(self) -> None:
        """Copy rank 0's weights of the parameters that are trained to the whole group."""
        self._group.broadcast(list(self._parameters.values()))

    def _copy_untrained_from_first(self) -> None:
        rest = untrained_tensors(self.model, self._parameters.values())
        forms = ", ".join(f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in rest.items())
        self._group.check_same("the model's frozen parameters and buffers", forms)
        self._group.broadcast(list(rest.values()))

    def _broadcast_model(self) -> None:
        """Copy rank 0's weights (frozen ones, too) and buffers to the whole group."""
        self._group.broadcast([*self.model.parameters(), *self.model.buffers()])

    def _begin_edit(self) -> None:
        self.kvstore.barrier()

    def _publish_weights(self) -> None:
        self._broadcast_model()

    def _reduce_step_vector(self, samples: int, active: bool, used: Iterable[bool]) -> Reduction:
        """Start to sum the vector of a step over the group."""
        rank, size = self._group.rank, self._group.size
        halt = self.kvstore.halt_flag
        clock = self.clock - self._clock_at_barrier
        retired = self._has_retired
        vector = step_vector(samples, halt, clock, used, rank=rank, size=size, active=active, retired=retired)
        if self._group.device.type == "cpu":
            return self._group.all_reduce(torch.tensor(vector, device="cpu"))
        # From pinned memory, so that the host does not wait until the device has finished its earlier work.
        pinned = torch.tensor(vector, device="cpu", pin_memory=True)
        return self._group.all_reduce(pinned.to(self._group.device, non_blocking=True))

    def _share_state(self, own: Mapping[str, Tensor], source: int) -> dict[str, Tensor]:
        """Return the state of the process `source`, which the others need not have. All processes call it."""
        state = dict(own) if self._group.rank == source else {}
        described = [(name, list(tensor.shape), dtype_name(tensor)) for name, tensor in state.items()]
        for name, shape, dtype in json.loads(self._group.gather_texts(json.dumps(described))[source]):
            state.setdefault(name, torch.empty(shape, dtype=getattr(torch, dtype), device="cpu"))
        self._group.broadcast(list(state.values()), source)
        return state


def _layout(parameter: nn.Parameter) -> str:
    """Return the order of a parameter's elements in memory, unless it is torch's usual one."""
    return "" if parameter.is_contiguous() else f" with strides {parameter.stride()}"
