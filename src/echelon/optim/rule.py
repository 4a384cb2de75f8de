"""The base class of the optimizers here: an update rule, and the torch optimizer around it.

A rule updates one tensor in place from its gradient, its states, the number of its updates and the settings. The torch
optimizer applies the rule to whole parameters, and servers apply it to their pieces of them: the same operations on the
same elements, so the same bits. A rule with `whole` set needs a whole parameter at once and rejects pieces.
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
    """A torch optimizer with one update rule. Its states are those of `state_fills` and, if there are any, `step`."""

    whole: ClassVar[bool] = False
    divides_gradient: ClassVar[bool] = False  # under GSP, gamma divides the gradient instead of the learning rate

    def __init__(self, params: ParamsT, **settings: Any) -> None:
        """Raises ValueError for negative settings, as torch.optim does."""
        for name in ("lr", "momentum", "weight_decay", "eps"):
            if not settings.get(name, 0) >= 0:
                raise ValueError(f"Invalid {name}: {settings[name]}")
        super().__init__(params, settings)

    @staticmethod
    def state_fills(options: Options) -> dict[str, float]:
        """Return the names and initial values of a parameter's states, in the order in which `update` gets them."""
        return {"momentum_buffer": 0.0} if options.get("momentum") else {}

    @staticmethod
    def update(
        weights: Tensor, gradient: Tensor, states: Sequence[Tensor], step: int, lr: float, options: Options
    ) -> None:
        """Update weights and states in place. The gradient must not be changed; `step` counts from 1."""
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
        """Count an update and return the number of updates. The count is on the CPU, as in torch.optim."""
        state["step"] = state.get("step", torch.tensor(0.0)) + 1
        return int(state["step"])
