"""Number formats of a training step: which, and what each needs to be safe.

Weights, gradients after their reduction, optimizer states and the loss are float32 always. The half formats are for
what happens inside the network. float16 has a small range, so its loss is scaled up before backward and the gradients
scaled down after it, by a factor that halves when gradients overflow (that step is left out) and doubles after 2,000
good ones. bfloat16 has float32's range and needs none of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

FIRST_SCALE = 2.0**15
GROWTH_STEPS = 2000
_HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Precision:
    """The network's inner format on one device; `half` is None for float32."""

    device: torch.device
    half: torch.dtype | None
    reason: str

    def autocast(self) -> AbstractContextManager[object]:
        """Around the forward pass."""
        return torch.autocast(self.device.type, self.half) if self.half is not None else nullcontext()

    @property
    def name(self) -> str:
        """As `--dtype` has it."""
        return str(self.half or torch.float32).removeprefix("torch.")


def choose_precision(dtype: str, device: torch.device) -> Precision:
    """What `--dtype` means on this device."""
    if dtype != "auto":
        return Precision(device, _HALVES.get(dtype), "as --dtype says")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        return Precision(device, torch.bfloat16, "this GPU's matrix units are several times faster with it")
    return Precision(device, None, f"{device.type} has no fast half precision")


class LossScaler:
    """float16's factor, kept on the device: a step that overflows is left out without asking the host."""

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.full((), FIRST_SCALE, device=device)
        self.found_inf = torch.zeros((), device=device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)

    def scaled(self, loss: Tensor) -> Tensor:
        """For backward."""
        return loss * self.scale

    def unscale(self, gradients: Sequence[Tensor]) -> None:
        """Divide in place, and note in `found_inf` whether any number is infinite or not a number."""
        self.found_inf.zero_()
        if gradients:
            torch._amp_foreach_non_finite_check_and_unscale_(list(gradients), self.found_inf, self.scale.reciprocal())

    def update(self) -> None:
        """After the step: halve or, after enough good steps, double."""
        torch._amp_update_scale_(self.scale, self._good_steps, self.found_inf, 2.0, 0.5, GROWTH_STEPS)

    def state(self) -> dict[str, Tensor]:
        """For a checkpoint."""
        return {"loss_scale": self.scale, "good_steps": self._good_steps}

    def load(self, state: dict[str, Tensor]) -> None:
        """From a checkpoint, if that was a float16 run, too."""
        if "loss_scale" in state:
            self.scale.copy_(state["loss_scale"])
            self._good_steps.copy_(state["good_steps"])
