"""A moving average of the weights, for validation and for use: `--ema-epochs E`.

At a constant learning rate the weights wander around a good place; their average over about the last E epochs lies
nearer to it, and it costs one kernel a step. Training itself never sees it. Averaged are the weights that steps were
made with: a step takes them in after its forward pass, when they are all there.

The sums begin at zero and are divided by the weight they have got so far, so the average is one from the first step on,
without a rule for the beginning. That weight is a function of steps and horizon. A run that goes on with another one
(as many epochs are another number of steps with another batch size) scales its sums to it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

PREFIX = "average."


class MovingAverage:
    """Averages parameters and floating-point buffers over a horizon of `steps`."""

    def __init__(self, model: nn.Module, steps: float) -> None:
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self._live = {name: tensor.data for name, tensor in named.items() if tensor.is_floating_point()}
        self._sums = {name: torch.zeros_like(tensor) for name, tensor in self._live.items()}
        self._share = 1 / max(1.0, steps)
        self.num_steps = 0

    def update(self) -> None:
        """Take in the weights as they are. Only device work, so that it can be captured; count it in `num_steps`."""
        torch._foreach_lerp_(list(self._sums.values()), list(self._live.values()), self._share)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model has the average."""
        if not self.num_steps:
            yield
            return
        kept = {name: tensor.clone() for name, tensor in self._live.items()}
        with torch.no_grad():
            for name, tensor in self._live.items():
                tensor.copy_(self._mean(name))
        try:
            yield
        finally:
            with torch.no_grad():
                for name, tensor in self._live.items():
                    tensor.copy_(kept[name])

    def state(self) -> dict[str, Tensor]:
        """For a checkpoint: the sums and their count, and nothing before the first step."""
        if not self.num_steps:
            return {}
        sums = {f"{PREFIX}{name}": tensor for name, tensor in self._sums.items()}
        share = torch.tensor(self._share, dtype=torch.float64)
        return sums | {f"{PREFIX}num_steps": torch.tensor(self.num_steps), f"{PREFIX}share": share}

    def load(self, state: dict[str, Tensor]) -> None:
        """From a checkpoint, if it has an average."""
        if f"{PREFIX}num_steps" not in state:
            return
        self.num_steps = int(state[f"{PREFIX}num_steps"])
        share = float(state[f"{PREFIX}share"])
        same = math.isclose(share, self._share, rel_tol=1e-6)  # older files have it in float32
        scale = 1.0 if same else _weight(self._share, self.num_steps) / _weight(share, self.num_steps)
        for name, tensor in self._sums.items():
            tensor.copy_(state[f"{PREFIX}{name}"] * scale)

    def _mean(self, name: str) -> Tensor:
        return self._sums[name] / _weight(self._share, self.num_steps)


def _weight(share: float, num_steps: int) -> float:
    """What the sums have got after so many steps, of 1."""
    return float(1 - (1 - share) ** num_steps)


def averaged(weights: dict[str, Tensor], extra: dict[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint's weights with its average in their place, if it has one."""
    if f"{PREFIX}num_steps" not in extra:
        return weights
    share, num_steps = float(extra[f"{PREFIX}share"]), int(extra[f"{PREFIX}num_steps"])
    got = _weight(share, num_steps)
    return {name: extra[f"{PREFIX}{name}"] / got if f"{PREFIX}{name}" in extra else w for name, w in weights.items()}
