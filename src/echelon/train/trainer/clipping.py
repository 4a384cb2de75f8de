"""Clipping by the global norm of the gradient: `Trainer(max_grad_norm=…)`, and `clip_grad_norm_` for one process.

What counts is the norm of the gradient that an update applies, over all parameters:

- If the optimizer runs in this process, the gradients are that mean when the step begins, and torch clips them.
- If servers update and sum the gradients of several workers, they compute the norm of the sum and clip it
  (`ServerStore.clip`). Gradients can still be sent during backward.
- If servers update with the gradients of one worker at a time, that worker clips its own gradient before it sends it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from echelon.errors import UsageError
from echelon.kvstore.collective.process_group import ProcessGroup
from echelon.kvstore.servers.store import ServerStore

_LIMIT = "max_grad_norm"  # a key with rank 0's


def check_max_norm(max_norm: float | None) -> float | None:
    """Return the limit as a float. Raise UsageError if it cannot be one; infinity only measures."""
    if max_norm is None:
        return None
    try:
        limit = float(max_norm)
    except (TypeError, ValueError):
        limit = math.nan
    if not limit > 0:
        raise UsageError(f"max_grad_norm must be a number above 0 (None: do not clip), not {max_norm!r}")
    return limit


def check_same_limit(store: ServerStore, max_norm: float | None) -> None:
    """Raise UsageError if another worker clips to another norm. All workers of a store call it once."""
    own, first = torch.tensor(max_norm or 0.0, device="cpu"), torch.empty((), device="cpu")
    store.broadcast(_LIMIT, own, first)
    if own != first:
        limit = float(first) or None
        raise UsageError(
            f"worker {store.rank} has max_grad_norm={max_norm}, but worker {store.workers[0]} has {limit}; give all "
            "workers the same"
        )


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Clip as torch.nn.utils.clip_grad_norm_ does, with its bits. Sparse gradients, which that refuses, work, too."""
    given = [parameter for parameter in parameters if parameter.grad is not None]
    if not any(parameter.grad is not None and parameter.grad.is_sparse for parameter in given):
        return nn.utils.clip_grad_norm_(given, max_norm)
    values = [_values(parameter) for parameter in given]
    norm = nn.utils.get_total_norm(values)
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for value in values:
        value.mul_(scale.to(value.device))
    return norm


def clip_shards(shards: Sequence[Tensor], max_norm: float, group: ProcessGroup) -> Tensor:
    """Clip gradients of which every rank of a group has a part. All ranks call it, and all get the same norm."""
    square = torch.zeros(1, dtype=torch.float64, device=group.device)
    for shard in shards:
        square += torch.linalg.vector_norm(shard, dtype=torch.float64).square().to(square.device)
    norm = group.all_reduce(square).result()[0].sqrt().float()
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for shard in shards:
        shard.mul_(scale.to(shard.device))
    return norm


def _values(parameter: nn.Parameter) -> Tensor:
    """Return the values of a gradient. Those of a row that a sparse gradient names twice are added first."""
    gradient = parameter.grad
    assert gradient is not None
    if not gradient.is_sparse:
        return gradient
    parameter.grad = gradient.coalesce()
    return parameter.grad._values()
