"""The training loss, and mixup, which changes images and loss together.

Mixup blends every image of a batch with the one before it (the first with the last), with one weight per batch. The
batch is already in random order, so no other permutation is needed, and none has to be copied to the device. The weight
is drawn from Beta(alpha, alpha) as a pure function of (seed, rank, step), so a resumed run draws the same weights.
`draw_weight` runs on the host. `blend` and `cross_entropy` read no value on the host: they can be compiled or captured
with the weight as an input.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from echelon.data.loading.order import uniforms
from echelon.errors import UsageError

MixupLabels: TypeAlias = tuple[Tensor, Tensor]  # the labels of the blended-in images, and the weight of the own ones

_STREAM = 0x6D69786564  # added to the seed, because augmentation draws from the seed itself with the same counters
_LARGEST = 700.0  # exp of this is still a finite float; beyond it, the weight is 0 or 1 to the last bit


def cross_entropy(
    logits: Tensor, labels: Tensor, label_smoothing: float = 0.0, mixed: MixupLabels | None = None
) -> Tensor:
    """Return the mean cross-entropy in float32; with `mixed`, the weighted mean for both labels."""
    logits = logits.float()
    loss = functional.cross_entropy(logits, labels, label_smoothing=label_smoothing)
    if mixed is None:
        return loss
    others, weight = mixed
    return torch.lerp(functional.cross_entropy(logits, others, label_smoothing=label_smoothing), loss, weight)


class Mixup:
    """Blends the batches of one process. `first_step`: the steps that were made before this process started."""

    def __init__(self, alpha: float, seed: int, rank: int, first_step: int = 0) -> None:
        self._alpha, self._seed, self._rank, self._first_step = alpha, seed, rank, first_step

    def __call__(self, images: Tensor, labels: Tensor, clock: int) -> tuple[Tensor, MixupLabels]:
        """Return the blended images and the labels for `cross_entropy`; `clock` counts this process's steps."""
        weight = draw_weight(self._alpha, self._seed, self._rank, self._first_step + clock)
        return blend(images, labels, torch.tensor(weight, device=images.device))


def blend(images: Tensor, labels: Tensor, weight: Tensor) -> tuple[Tensor, MixupLabels]:
    """Blend a batch with a weight that is on the device already (float32, no dimensions)."""
    if not images.is_floating_point():
        raise UsageError(f"mixup of {images.dtype} images would round them; convert and normalise them first")
    return torch.lerp(_before(images), images, weight.to(images.dtype)), (_before(labels), weight)


def draw_weight(alpha: float, seed: int, rank: int, step: int) -> float:
    """Draw a weight in [0, 1] from Beta(alpha, alpha).

    If t has Student's t distribution with 2 alpha degrees of freedom, (1 + t / sqrt(2 alpha + t²)) / 2 has this
    distribution. Bailey's polar method makes such a t from two uniform numbers: exact for every alpha, without a loop
    or an incomplete beta function.
    """
    if not (math.isfinite(alpha) and alpha > 0):
        raise UsageError(f"mixup with alpha {alpha:g}: alpha must be finite and above 0; 0.2 is usual for images")
    radius, angle = uniforms(seed + _STREAM, rank, np.array([step]), 2)[0].tolist()
    cosine = math.cos(2 * math.pi * angle)
    ratio = math.expm1(min(-math.log1p(-radius) / alpha, _LARGEST)) * cosine * cosine  # t² / (2 alpha)
    return (1 + math.copysign(math.sqrt(ratio / (1 + ratio)), cosine)) / 2


def _before(batch: Tensor) -> Tensor:
    """Return the predecessor of every sample. Concatenating slices keeps the images' layout (channels-last)."""
    return torch.cat([batch[-1:], batch[:-1]])
