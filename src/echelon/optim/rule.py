"""What the optimizers here have in common: a rule, and the torch optimizer around it.

A rule changes one tensor in place by its gradient, given the states, how often it was updated, and the settings. The
torch optimizer applies it to whole parameters, the servers to their pieces of them: the same calls on the same
elements, so the same bits. A rule that is `whole` needs all of a parameter at once, and cannot be given pieces.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

Options = Mapping[str, Any]


class Rule(Optimizer):
    """A torch optimizer of one rule. Its states are `step` and those of `state_fills`; without those it has none."""

    whole: ClassVar[bool] = False
    divides_gradient: ClassVar[bool] = False  # for GSP: gamma divides the gradient, rather than the learning rate

    def __init__(self, params: ParamsT, **settings: Any) -> None:
        """Numbers below zero are refused as torch.optim does, by a ValueError."""
        for name in ("lr", "momentum", "weight_decay", "eps"):
            if not settings.get(name, 0) >= 0:
                raise ValueError(f"Invalid {name}: {settings[name]}")
        super().__init__(params, settings)

    @staticmethod
    def state_fills(options: Options) -> dict[str, float]:
        """The names of a parameter's states, in the order in which `update` gets them, and their first values."""
        return {"momentum_buffer": 0.0} if options.get("momentum") else {}

    @staticmethod
    def update(
        weights: Tensor, gradient: Tensor, states: Sequence[Tensor], step: int, lr: float, options: Options
    ) -> None:
        """Update weights and states in place; the gradient is read only, and `step` counts from 1."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        numbers = itertools.count()
        for group in self.param_groups:
            for parameter, number in zip(group["params"], numbers, strict=False):
                if parameter.grad is not None:
                    self._update_one(number, parameter, group)
        return loss

    def _update_one(self, number: int, parameter: Tensor, group: Options) -> None:
        fills = self.state_fills(group)
        state = self.state[parameter] if fills else {}
        for name, fill in fills.items():
            if name not in state:
                state[name] = torch.full_like(parameter, fill, memory_format=torch.preserve_format)
        step = self._count(state) if fills else 1
        states = [state[name] for name in fills]
        assert parameter.grad is not None
        self.update(parameter, parameter.grad, states, step, float(group["lr"]), group)

    @staticmethod
    def _count(state: dict[str, Any]) -> int:
        """How often a parameter was updated, this time included. On the CPU, as torch.optim keeps it."""
        state["step"] = state.get("step", torch.tensor(0.0)) + 1
        return int(state["step"])
