"""The digits as the floats that a network gets, without a loader."""

from __future__ import annotations

import torch
from torch import Tensor

from echelon.data.sets.builtin import load_digits


def load_float_digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return ((train images, labels), (validation images, labels)); images are float32 1x8x8 of about zero mean."""
    train, validation = (
        (torch.from_numpy(source.images).permute(0, 3, 1, 2).float() / 8.0 - 0.6, torch.from_numpy(source.labels))
        for source in load_digits()
    )
    return train, validation
