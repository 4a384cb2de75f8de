"""The number formats of a training step, and what each of them needs.

Weights, gradients after their reduction, optimizer states and the loss are always float32. The half formats are used
inside the network only. float16 has a small range. So the loss is scaled up before backward and the gradients are
scaled down after it. The factor halves when gradients overflow (that step is skipped) and doubles after 2,000 good
steps. bfloat16 has the range of float32 and needs no scaling.

Captured steps keep half-precision copies of the weights of convolutions and matrix products (`HalfWeights`) and renew
all of them at once after the update. Autocast would cast each weight, and each gradient back, with a kernel of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

FIRST_SCALE = 2.0**15
GROWTH_STEPS = 2000
_HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Precision:
    """The format that the network computes in on one device; `half` is None for float32."""

    device: torch.device
    half: torch.dtype | None
    reason: str

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context that the forward pass runs in."""
        return torch.autocast(self.device.type, self.half) if self.half is not None else nullcontext()

    @property
    def name(self) -> str:
        """The name of the format, as in `--dtype`."""
        return str(self.half or torch.float32).removeprefix("torch.")


def choose_precision(dtype: str, device: torch.device) -> Precision:
    """Return the format that `--dtype` selects on this device, with the reason."""
    if dtype != "auto":
        return Precision(device, _HALVES.get(dtype), "set by --dtype")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        return Precision(device, torch.bfloat16, "this GPU's matrix units are several times faster with it")
    return Precision(device, None, f"{device.type} has no fast half precision")


class LossScaler:
    """The loss scale of float16. It is kept on the device, so that a captured step can skip itself on overflow."""

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.full((), FIRST_SCALE, device=device)
        self.found_inf = torch.zeros((), device=device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss to run backward on."""
        return loss * self.scale

    def unscale(self, gradients: Sequence[Tensor]) -> None:
        """Divide gradients by the scale in place; sets `found_inf` if any value is infinite or NaN."""
        self.found_inf.zero_()
        if gradients:
            torch._amp_foreach_non_finite_check_and_unscale_(list(gradients), self.found_inf, self.scale.reciprocal())

    def update(self) -> None:
        """Adjust the scale after a step: halve it on overflow, double it after enough good steps."""
        torch._amp_update_scale_(self.scale, self._good_steps, self.found_inf, 2.0, 0.5, GROWTH_STEPS)

    def state(self) -> dict[str, Tensor]:
        """Return the tensors to save in a checkpoint."""
        return {"loss_scale": self.scale, "good_steps": self._good_steps}

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore the scale from a checkpoint, if that was a float16 run, too."""
        if "loss_scale" in state:
            self.scale.copy_(state["loss_scale"])
            self._good_steps.copy_(state["good_steps"])


def weights_to_halve(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights that autocast would cast, by name.

    Weights with several names (tied weights, and those of a module that is used twice) are left to autocast: each is
    one parameter, and its gradient is the sum over all uses.
    """
    kinds = (nn.Linear, nn.modules.conv._ConvNd)
    owners = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
    found = {f"{name}.weight" if name else "weight": module.weight for name, module in owners.items()}
    names = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    return {name: weight for name, weight in found.items() if weight.requires_grad and names[id(weight)] == 1}


class HalfWeights:
    """Half-precision copies of the weights that autocast would cast. The network computes with the copies."""

    def __init__(self, model: nn.Module, half: torch.dtype) -> None:
        self._full = weights_to_halve(model)
        self.copies = {name: w.detach().to(half).requires_grad_() for name, w in self._full.items()}

    def clear_gradients(self) -> None:
        """Clear the gradients of the copies. Call it before backward."""
        for copy in self.copies.values():
            copy.grad = None

    def convert_gradients(self) -> None:
        """After backward, give the weights the gradients of their copies in float32; unused weights get none."""
        halves = {name: copy.grad for name, copy in self.copies.items() if copy.grad is not None}
        gradients = [torch.empty_like(self._full[name]) for name in halves]
        torch._foreach_copy_(gradients, list(halves.values()))
        for name, gradient in zip(halves, gradients, strict=True):
            self._full[name].grad = gradient

    def renew(self) -> None:
        """Copy the weights into the copies again. Call it after the update."""
        torch._foreach_copy_(
            [copy.detach() for copy in self.copies.values()], [w.detach() for w in self._full.values()]
        )
