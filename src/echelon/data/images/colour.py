"""Colour augmentation of one uint8 image: brightness, contrast, saturation, hue and lightness, PCA noise.

Brightness, contrast, saturation and PCA noise are affine in (r, g, b), so they are combined into one 3x3 matrix and one
offset, which take one pass (0.3 ms for 224x224). The three jitters commute, so the random order in which MXNet applies
them matters only because it rounds and clamps after each; here that is done once, at the end. Shifts of hue, lightness
and saturation are not affine and take 1 ms: about forty passes of torch over float planes, most of them in place.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.data.images.config import AugmentConfig
from echelon.data.images.decode import Pixels
from echelon.data.images.geometry import Draw, Draws

Floats: TypeAlias = NDArray[np.float32]

_TINY = 1e-12  # avoids 0 / 0
_GREY = np.array((0.299, 0.587, 0.114), np.float32)
_PCA_VALUES = np.array((55.46, 4.794, 1.148), np.float32)
_PCA_VECTORS = np.array(
    ((-0.5675, 0.7192, 0.4009), (-0.5808, -0.0045, -0.8140), (-0.5836, -0.6948, 0.4203)), np.float32
)


def recolour(pixels: Pixels, config: AugmentConfig, draws: Draws) -> Pixels:
    """Return the recoloured image (height, width, 3); in memory it is three planes."""
    planes = torch.from_numpy(np.array(pixels.transpose(2, 0, 1), order="C")).float().reshape(3, -1)
    if config.jitters:
        matrix, offset = _jitter(planes, config, draws)
        planes = torch.addmm(offset, matrix, planes)
    if config.shifts_hls:
        # Rounded first, because a grey with a rounding error would have a hue.
        planes = _shift_hls(planes.round_().clamp_(0, 255), config, draws)
    if config.pca_noise:
        planes += torch.from_numpy(_pca_offset(config.pca_noise, draws))[:, None]
    rounded: Pixels = planes.round_().clamp_(0, 255).to(torch.uint8).numpy()
    return rounded.reshape(3, *pixels.shape[:2]).transpose(1, 2, 0)


def _jitter(planes: Tensor, config: AugmentConfig, draws: Draws) -> tuple[Tensor, Tensor]:
    """Return matrix and offset of brightness, contrast and saturation combined."""
    light = _factor(config.brightness, draws[Draw.BRIGHTNESS])
    spread = _factor(config.contrast, draws[Draw.CONTRAST])
    keep = _factor(config.saturation, draws[Draw.SATURATION])
    blend = keep * np.eye(3, dtype=np.float32) + (1 - keep) * np.tile(_GREY, (3, 1))
    grey = _GREY @ planes.mean(1).numpy()
    offset = np.full((3, 1), light * (1 - spread) * grey, np.float32)
    return torch.from_numpy(light * spread * blend), torch.from_numpy(offset)


def _factor(size: float, draw: float) -> np.float32:
    return np.float32(1 + size * (2 * draw - 1))


def _pca_offset(size: float, draws: Draws) -> Floats:
    normals = []
    for lane in range(Draw.PCA, Draw.PCA + 6, 2):
        radius = math.sqrt(-2 * math.log(1 - draws[lane]))
        normals.append(radius * math.cos(2 * math.pi * draws[lane + 1]))
    return _PCA_VECTORS @ (np.array(normals, np.float32) * np.float32(size) * _PCA_VALUES)


def _shift_hls(planes: Tensor, config: AugmentConfig, draws: Draws) -> Tensor:
    """Shift hue (0 ... 180, clamped), lightness and saturation (0 ... 255) by one integer each."""
    limits = (config.max_random_h, config.max_random_l, config.max_random_s)
    hue_by, light_by, saturation_by = (_shift(limit, draws, Draw.HLS + 2 * k) for k, limit in enumerate(limits))
    hue, light, saturation = _to_hls(planes.div_(255))
    hue.add_(hue_by / 15).clamp_(0, 12)
    light.add_(light_by / 255).clamp_(0, 1)
    saturation.add_(saturation_by / 255).clamp_(0, 1)
    return _from_hls(hue, light, saturation, planes).mul_(255)


def _shift(limit: int, draws: Draws, lane: int) -> int:
    """Return an integer in ±limit, from two uniform numbers weighted 1 to 4, so that extremes are rarer."""
    return round(limit * (2 * (draws[lane] + 4 * draws[lane + 1]) / 5 - 1))


def _to_hls(planes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return hue in twelfths of the circle, lightness and saturation in 0 ... 1."""
    red, green, blue = planes
    high, low = torch.maximum(red, green).maximum(blue), torch.minimum(red, green).minimum(blue)
    span, light = high - low, high.add(low).div_(2)
    is_red, is_green = high == red, high == green
    ahead = torch.where(is_red, green - blue, torch.where(is_green, blue - red, red - green))
    hue = ahead.div_(span.clamp_min(_TINY)).mul_(2)
    hue += torch.where(is_red, torch.where(ahead < 0, 12.0, 0.0), torch.where(is_green, 4.0, 8.0))
    room = torch.minimum(light, 1 - light).mul_(2)
    return hue, light, span.div_(room.clamp_min_(_TINY))


def _from_hls(hue: Tensor, light: Tensor, saturation: Tensor, out: Tensor) -> Tensor:
    """Write red, green and blue to `out`. Each is strongest at its own hue, and weakest half a circle away."""
    reach = torch.minimum(light, 1 - light).mul_(saturation)
    for plane, away in zip(out, (6, 10, 2), strict=True):
        torch.sub(hue, away, out=plane)
        plane.abs_().sub_(6).abs_().sub_(3).clamp_(-1, 1)  # 3 minus the distance from `away` on the circle
        plane.mul_(reach).neg_().add_(light)
    return out
