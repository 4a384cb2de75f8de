"""Small models that several loops share, and the simplest step."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from loops.kinds import FEATURES, TARGETS

WIDTH = 8


def mlp() -> nn.Sequential:
    """Return a network with one hidden layer."""
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, TARGETS))


def momentum(model: nn.Module, lr: float = 0.05) -> Optimizer:
    """Return SGD with momentum and weight decay: a step depends on all steps before."""
    return SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=0.01)


def step(loss: Tensor, optimizer: Optimizer) -> None:
    """Make a step as most loops do. A loop that does something unusual in between writes these lines itself."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
