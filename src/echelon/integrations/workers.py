"""What the drop-ins share: values that travel between workers outside of steps, and how a training begins and ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.errors import UsageError
from echelon.kvstore import create
from echelon.schemes.stores import store_kind
from echelon.train.trainer import Trainer


class Workers:
    """All workers of the job, this one among them. They make the same calls in the same order.

    Values travel through a store of their own, so that they neither wait for steps nor count as steps.
    """

    def __init__(self, kvstore: str) -> None:
        kind = store_kind(kvstore)
        self.lock_step = kind.lock_step  # whether the workers are always at the same step
        self._store = create("dist_sync" if kind.spans_workers else kvstore)
        self.rank = self._store.rank
        self.count = self._store.num_workers
        self.barrier = self._store.barrier
        self.gather = self._store.gather
        self.all_reduce = self._store.all_reduce

    def concatenate(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all workers as one. A number becomes a vector."""
        return torch.cat([one.reshape(one.shape or (1,)) for one in self.gather(tensor)])

    def pad(self, tensor: Tensor, dim: int, filler: float, *, at_start: bool = False) -> Tensor:
        """Return the tensor with the largest size that any worker's has in one dimension."""
        shapes: list[list[int]] = self.gather(list(tensor.shape))
        if not -tensor.ndim <= dim < tensor.ndim:
            return tensor
        missing = list(tensor.shape)
        missing[dim] = max(shape[dim] for shape in shapes) - tensor.shape[dim]
        more = tensor.new_full(missing, filler)
        return torch.cat([more, tensor] if at_start else [tensor, more], dim)


def check_norm(wanted: float, limit: float | None, taker: str) -> None:
    """Raise UsageError if a loop clips to another norm than the stores do."""
    if wanted != limit:
        raise UsageError(
            f"clipping to a norm of {wanted} would clip the gradient of one worker; pass "
            f"{taker}(max_grad_norm={wanted}), which clips the gradient of all workers (now: {limit})"
        )


def optimized_module(optimizer: Optimizer, models: Sequence[nn.Module]) -> nn.Module:
    """Return the model that an optimizer belongs to, or all of its models as one module."""
    wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    owners = [model for model in models if wanted & {id(parameter) for parameter in model.parameters()}]
    if not owners:
        raise UsageError("an optimizer was given without its model; prepare the two together")
    return owners[0] if len(owners) == 1 else nn.ModuleList(owners)


def inside(contexts: Iterable[AbstractContextManager[Any]]) -> ExitStack:
    """Return all contexts as one."""
    stack = ExitStack()
    for context in contexts:
        stack.enter_context(context)
    return stack


def meet(trainers: Iterable[Trainer], workers: Workers) -> None:
    """Wait for the other workers at the same point of a training. The models then have the updates of all."""
    for trainer in trainers:
        trainer.sync()
    workers.barrier()
    for trainer in trainers:
        if not trainer.kvstore.kind.lock_step:
            trainer.refresh()


def finish(trainers: list[Trainer]) -> None:
    """End a training: wait for the other workers, and leave the models with the updates of all of them."""
    while trainers:
        trainers.pop().close()
