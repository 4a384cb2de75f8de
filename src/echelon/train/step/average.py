"""A moving average of the weights, for validation and prediction: `--ema-epochs E`.

At a constant learning rate the weights move around a good point. Their average over about the last E epochs is closer
to it, and costs one kernel per step. Training itself never reads the average. A step adds the weights that it computes
with, after its forward pass, because all weights have arrived by then.

The sums start at zero and are divided by the total weight they have received, so the average is exact from the first
step on, without a special rule for the start. That total is a function of the number of steps and the horizon. A run
that is resumed with another horizon (for example because another batch size changes the steps per epoch) rescales its
sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

PREFIX = "average."


class MovingAverage:
    """Averages the parameters and floating-point buffers of a model over about the last `steps` steps."""

    def __init__(self, model: nn.Module, steps: float) -> None:
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self._current = {name: tensor.data for name, tensor in named.items() if tensor.is_floating_point()}
        self._sums = {name: torch.zeros_like(tensor) for name, tensor in self._current.items()}
        self._share = 1 / max(1.0, steps)
        self.num_steps = 0

    def update(self) -> None:
        """Add the current weights, with device operations only. The caller increments `num_steps`."""
        torch._foreach_lerp_(list(self._sums.values()), list(self._current.values()), self._share)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Return a context in which the model holds the average."""
        if not self.num_steps:
            yield
            return
        kept = {name: tensor.clone() for name, tensor in self._current.items()}
        with torch.no_grad():
            for name, tensor in self._current.items():
                tensor.copy_(self._mean(name))
        try:
            yield
        finally:
            with torch.no_grad():
                for name, tensor in self._current.items():
                    tensor.copy_(kept[name])

    def state(self) -> dict[str, Tensor]:
        """Return the tensors to save in a checkpoint; none before the first step."""
        if not self.num_steps:
            return {}
        sums = {f"{PREFIX}{name}": tensor for name, tensor in self._sums.items()}
        share = torch.tensor(self._share, dtype=torch.float64)
        return sums | {f"{PREFIX}num_steps": torch.tensor(self.num_steps), f"{PREFIX}share": share}

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore the average from a checkpoint, if it has one."""
        if f"{PREFIX}num_steps" not in state:
            return
        self.num_steps = int(state[f"{PREFIX}num_steps"])
        share = float(state[f"{PREFIX}share"])
        same = math.isclose(share, self._share, rel_tol=1e-6)  # older files store it in float32
        scale = 1.0 if same else _total_weight(self._share, self.num_steps) / _total_weight(share, self.num_steps)
        for name, tensor in self._sums.items():
            tensor.copy_(state[f"{PREFIX}{name}"] * scale)

    def _mean(self, name: str) -> Tensor:
        return self._sums[name] / _total_weight(self._share, self.num_steps)


def _total_weight(share: float, num_steps: int) -> float:
    """Return the total weight that the sums have received after `num_steps` steps; it approaches 1."""
    return float(1 - (1 - share) ** num_steps)


def averaged(weights: dict[str, Tensor], extra: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a checkpoint, replaced by its average if it has one."""
    if f"{PREFIX}num_steps" not in extra:
        return weights
    share, num_steps = float(extra[f"{PREFIX}share"]), int(extra[f"{PREFIX}num_steps"])
    total = _total_weight(share, num_steps)
    return {name: extra[f"{PREFIX}{name}"] / total if f"{PREFIX}{name}" in extra else w for name, w in weights.items()}
