"""Optimizer classes as users write them, for tests of the servers that import them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT


class Lion(Optimizer):
    """Lion (Chen et al., 2023), with in-place changes of the gradient, and a number and a flag per parameter."""

    def __init__(
        self, params: ParamsT, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99), **other: Any
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0, "rule": "lion", **other})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update every parameter."""
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state |= {"exp_avg": torch.zeros_like(parameter), "count": 0, "scale": 0.1, "warm": False}
                state["count"] += 1
                state["scale"] *= 0.9
                state["warm"] = state["count"] > 1
                gradient = parameter.grad.add_(parameter, alpha=group["weight_decay"])
                change = state["exp_avg"].mul(first).add_(gradient, alpha=1 - first).sign_()
                parameter.add_(change, alpha=-group["lr"] * (1 + state["scale"] * state["warm"]))
                state["exp_avg"].mul_(second).add_(gradient, alpha=1 - second)
        return None


class NeedsMore(Lion):
    """Needs an argument that is not a setting."""

    def __init__(self, params: ParamsT, model: Any) -> None:
        super().__init__(params)


class Broken(Lion):
    """Fails in its second step."""

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Fail if there is a state."""
        if self.state:
            raise RuntimeError("no luck")
        return super().step(closure)
