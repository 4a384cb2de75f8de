"""The state of torch's random number generators as tensors, to be stored in `Checkpoint.extra`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_CPU, _CUDA = "rng.cpu", "rng.cuda"


def capture_rng(device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Return the state of the CPU generator and, if `device` is a GPU, of that GPU's generator."""
    states = {_CPU: torch.get_rng_state()}
    if torch.device(device).type == "cuda":
        states[_CUDA] = torch.cuda.get_rng_state(device)
    return states


def restore_rng(states: Mapping[str, Tensor], device: torch.device | str = "cpu") -> None:
    """Set the generators to what `capture_rng` returned; missing states and those of an unused GPU are ignored."""
    if _CPU in states:
        torch.set_rng_state(states[_CPU])
    if _CUDA in states and torch.device(device).type == "cuda":
        torch.cuda.set_rng_state(states[_CUDA], device)
