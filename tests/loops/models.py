"""What many loops share: a small model, an optimizer with a memory, and the simplest step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from loops.kinds import FEATURES, TARGETS
from loops.loop import Run

WIDTH = 8


class Begun(NamedTuple):
    """A model, its optimizer, and the module that the loop calls."""

    model: nn.Module
    optimizer: Optimizer
    net: nn.Module


def mlp() -> nn.Sequential:
    """Return a network with one hidden layer."""
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, TARGETS))


def momentum(model: nn.Module, lr: float = 0.05) -> Optimizer:
    """Return SGD with momentum and weight decay: a step depends on all steps before."""
    return SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=0.01)


def begin(
    run: Run,
    model: nn.Module | None = None,
    optimizer: Callable[[nn.Module], Optimizer] = momentum,
    **options: Any,
) -> Begun:
    """Build a model and its optimizer, and attach them."""
    model = mlp() if model is None else model
    made = optimizer(model)
    return Begun(model, made, run.attach(model, made, **options))


def device_type() -> str:
    """Return the type of the device that the loops run on."""
    return torch.get_default_device().type


def step(loss: Tensor, optimizer: Optimizer) -> None:
    """Make a step as most loops do. A loop that does something unusual in between writes these lines itself."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
