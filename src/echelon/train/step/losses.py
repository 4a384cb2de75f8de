"""The loss that is trained on, and mixup, which changes images and loss together.

Mixup blends every image of a batch with the one before it (the first with the last), by one weight a batch; the batch
comes in random order already, so no other permutation is needed, and none has to travel to the device. The weight is
drawn from Beta(alpha, alpha) as a pure function of (seed, epoch, counter): with a counter that goes on where the run
goes on, a resumed run draws the same (`steps.Mixup` counts a process's steps, and has its rank for an epoch).
`draw_weight` happens on the host; `blend` and `cross_entropy` look at no value and can be compiled or captured with
the weight as an input.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from echelon.data.loading.order import uniforms
from echelon.errors import UsageError

Mixed = tuple[Tensor, Tensor]  # the labels blended in, and the share of the batch's own

_STREAM = 0x6D69786564  # added to the seed: augmentation draws from the seed itself, by the same counters
_LARGEST = 700.0  # exp of this is still a float; beyond, the weight is 0 or 1 to the last bit


def cross_entropy(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0, mixup: Mixed | None = None) -> Tensor:
    """Mean cross-entropy in float32; with `mixup`, of both labels by their shares."""
    logits = logits.float()
    loss = functional.cross_entropy(logits, labels, label_smoothing=label_smoothing)
    if mixup is None:
        return loss
    others, weight = mixup
    return torch.lerp(functional.cross_entropy(logits, others, label_smoothing=label_smoothing), loss, weight)


def mixup(images: Tensor, labels: Tensor, alpha: float, *, seed: int, epoch: int, counter: int) -> tuple[Tensor, Mixed]:
    """Blended images, and what `cross_entropy` needs to know of it.

    `counter` tells batches of an epoch apart; the counter of a batch's first sample does so for all workers.
    """
    weight = torch.tensor(draw_weight(alpha, seed, epoch, counter), device=images.device)
    return blend(images, labels, weight)


def blend(images: Tensor, labels: Tensor, weight: Tensor) -> tuple[Tensor, Mixed]:
    """Mixup by a weight that is already on the device (float32, no dimensions)."""
    if not images.is_floating_point():
        raise UsageError(f"mixup of {images.dtype} images would round them; convert and normalise them first")
    return torch.lerp(_before(images), images, weight.to(images.dtype)), (_before(labels), weight)


def draw_weight(alpha: float, seed: int, epoch: int, counter: int) -> float:
    """A weight in [0, 1] from Beta(alpha, alpha).

    Of a Student's t of 2 alpha degrees of freedom, (1 + t / sqrt(2 alpha + t²)) / 2 has this distribution, and Bailey's
    polar method makes such a t out of two uniforms: exact for every alpha, without a loop or an incomplete beta.
    """
    if not (math.isfinite(alpha) and alpha > 0):
        raise UsageError(f"mixup with alpha {alpha:g}: it must be above 0; 0.2 is usual for images")
    radius, angle = uniforms(seed + _STREAM, epoch, np.array([counter]), 2)[0].tolist()
    cosine = math.cos(2 * math.pi * angle)
    ratio = math.expm1(min(-math.log1p(-radius) / alpha, _LARGEST)) * cosine * cosine  # t² / (2 alpha)
    return (1 + math.copysign(math.sqrt(ratio / (1 + ratio)), cosine)) / 2


def _before(batch: Tensor) -> Tensor:
    """Every sample's predecessor; putting slices together keeps the layout (channels-last) of the images."""
    return torch.cat([batch[-1:], batch[:-1]])
