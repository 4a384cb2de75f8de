"""Gradients that notice writes."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from echelon.train.trainer.servers.gradients import WatchedGradient, Write

WRITES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda g: g.clamp_(-1, 1),
    "through .data": lambda g: g.data.clamp_(-1, 1),
    "through a view of .data": lambda g: g.data.view(-1)[1:].add_(1),
    "by index": lambda g: g.__setitem__(0, 1.0),
    "augmented": lambda g: g.__iadd__(1.0),
    "to a row of an iteration": lambda g: next(iter(g)).zero_(),
    "of many": lambda g: torch._foreach_add_([g], 1.0),
    "out=": lambda g: torch.add(g.detach().clone(), 1, out=g),
    "clip_grad_norm_": lambda g: torch._foreach_mul_([g], torch.tensor(0.5)),
}
READS: dict[str, Callable[[Tensor], object]] = {
    "norm": lambda g: g.norm(),
    "sum of .data": lambda g: g.data.sum(),
    "clone": lambda g: g.clone().zero_(),
    "arithmetic": lambda g: (g * 2).add_(1),
    "deepcopy": lambda g: copy.deepcopy(g).zero_(),
    "saved": lambda g: torch.save(g, io.BytesIO()),
    "numpy": lambda g: g.numpy().sum(),
    "requires_grad_": lambda g: g.requires_grad_(False),
}


def watched(dtype: torch.dtype = torch.float32) -> tuple[Tensor, list[Write]]:
    writes: list[Write] = []
    return WatchedGradient.of(torch.full((3, 2), 5.0, dtype=dtype), writes.append), writes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("how", WRITES)
def test_a_write_is_reported_before_it_happens(how: str, dtype: torch.dtype) -> None:
    def refuse(_: Write) -> None:
        raise PermissionError

    gradient, writes = watched(dtype)
    WRITES[how](gradient)
    assert len(writes) == 1
    guarded = WatchedGradient.of(torch.full((3, 2), 5.0, dtype=dtype), refuse)
    with pytest.raises(PermissionError):
        WRITES[how](guarded)
    assert (guarded == 5.0).all()


@pytest.mark.parametrize("how", READS)
def test_a_read_is_not_reported(how: str) -> None:
    gradient, writes = watched()
    READS[how](gradient)
    assert not writes
    assert (gradient == 5.0).all()


def test_a_write_through_numpy_is_an_error() -> None:
    gradient, _ = watched()
    with pytest.raises(ValueError, match="read-only"):
        gradient.numpy()[0, 0] = 1.0


def test_which_writes_only_scale() -> None:
    """Scaling by a number commutes with the sum over workers; scaling by what a tensor says need not."""
    gradient, writes = watched()
    gradient.mul_(0.5)
    gradient /= 4
    torch._foreach_mul_([gradient], 2.0)
    parameter = nn.Parameter(torch.zeros(3, 2))
    parameter.grad = gradient
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD([parameter], lr=0.1))
    assert [write.is_scaling for write in writes] == [True] * 4
    gradient.mul_(torch.tensor(0.5))
    nn.utils.clip_grad_norm_([parameter], 0.1)
    assert [write.is_scaling for write in writes[4:]] == [False] * 2


def test_autograd_adds_to_a_watched_gradient() -> None:
    parameter = nn.Parameter(torch.zeros(3, 2))
    gradient, writes = watched()
    parameter.grad = gradient
    parameter.sum().backward()
    assert parameter.grad is gradient
    assert (gradient == 6.0).all()
    assert not writes
