"""Computes which pixels of the source an augmented image shows; does not touch pixels.

MXNet resizes, warps, pads, crops and resizes again, each time the whole image. Here the steps are combined first, and
only the crop is resampled, once, directly from the decoded image. Most settings result in an upright box of the source;
only rotation and shear need a matrix.

Coordinates are continuous: a pixel is a square of side 1 with its centre at .5, so scaling needs no half-pixel shift.
MXNet cuts whole pixels out of the resized image. In the source such a box may begin and end inside a pixel, and it is
sampled there: rounded to whole pixels of the source, the image would be up to half a pixel away from MXNet's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from echelon.data.images.config import AugmentConfig

Draws: TypeAlias = Sequence[float]
"""The random numbers of one sample, in [0, 1), indexed by Draw."""

_TRIES = 10
_DRAWS_PER_TRY = 5
_MAX_SHRINK = 8
_NEGLIGIBLE = 1e-6  # of a pixel
_MIRRORED_BELOW = 0.5


class Draw(IntEnum):
    """Which random number decides what. Fixed, so that enabling one augmentation does not change the others."""

    MIRROR = 0
    CROP_X = 1
    CROP_Y = 2
    SHEAR = 3
    ANGLE = 4
    SCALE = 5
    RATIO = 6
    CROP_SIZE = 7
    BRIGHTNESS = 8
    CONTRAST = 9
    SATURATION = 10
    HLS = 11  # two for each of hue, lightness, saturation
    PCA = 17  # two for each of three normal numbers
    TRIES = 23  # five for each try of a random resized crop


def num_draws(config: AugmentConfig) -> int:
    """Return how many random numbers a sample needs."""
    return Draw.TRIES + (_TRIES * _DRAWS_PER_TRY if config.random_resized_crop else 0)


@dataclass(frozen=True, slots=True)
class Geometry:
    """The box (left, top, right, bottom) of the source that fills the output; it may extend beyond the image.

    With a matrix (a, b, c, d, e, f), the output point (x, y) comes from (ax + by + c, dx + ey + f) instead, and the box
    contains all those points. With a window (left, top, right, bottom), the output outside the window is filled even if
    the source has pixels there, because an image is warped within its own size before it is padded.
    """

    box: tuple[float, float, float, float]
    mirror: bool = False
    matrix: tuple[float, float, float, float, float, float] | None = None
    window: tuple[int, int, int, int] | None = None

    def shrink(self, height: int, width: int) -> int:
        """Return the largest power of two, up to 8, by which the source can shrink without being enlarged later."""
        left, top, right, bottom = self.box
        if self.matrix is None:
            room = min((right - left) / width, (bottom - top) / height)
        else:
            a, b, _, d, e, _ = self.matrix
            room = min(math.hypot(a, d), math.hypot(b, e))
        shrink = 1
        while shrink < _MAX_SHRINK and shrink * 2 <= room + 1e-9:
            shrink *= 2
        return shrink

    @property
    def is_whole(self) -> bool:
        """Whether the box consists of whole source pixels. It is cut out before it is resized: none around it count."""
        return all(is_whole(edge) for edge in self.box)

    def reach(self, shrink: int, height: int, width: int) -> tuple[int, int, int, int]:
        """Return the box of source pixels that are needed to sample this size at 1/shrink."""
        left, top, right, bottom = self.box
        if self.matrix is not None:
            x = y = shrink  # for bilinear interpolation
        elif self.is_whole:
            x = y = 0
        else:
            x = shrink * math.ceil(filter_reach((right - left) / width / shrink))
            y = shrink * math.ceil(filter_reach((bottom - top) / height / shrink))
        return math.floor(left) - x, math.floor(top) - y, math.floor(right) + 1 + x, math.floor(bottom) + 1 + y


def is_whole(edge: float) -> bool:
    """Return whether an edge is between two pixels, but for rounding errors."""
    return abs(edge - round(edge)) < _NEGLIGIBLE


def filter_reach(scale: float) -> float:
    """Return how many pixels outside a box the antialiasing filter may read if an output pixel is `scale` pixels wide.

    The filter is a triangle of half the width max(1, scale) around the centre of the output pixel.
    """
    return max(1.0, scale) - scale / 2 + 1  # the last pixel counts whole


class _Canvas:
    """An image without pixels: its size, and the map from its points to points of the source."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.a, self.b, self.c = 1.0, 0.0, 0.0
        self.d, self.e, self.f = 0.0, 1.0, 0.0
        self.window: tuple[float, float, float, float] | None = None  # where the image is after padding

    def shift(self, x: float, y: float) -> None:
        """Move the origin to the point (x, y)."""
        self.c += self.a * x + self.b * y
        self.f += self.d * x + self.e * y
        if self.window is not None:
            left, top, right, bottom = self.window
            self.window = left - x, top - y, right - x, bottom - y

    def transform(self, p: float, q: float, r: float, s: float) -> None:
        """Map the new point (x, y) to the old point (px + qy, rx + sy)."""
        self.a, self.b = self.a * p + self.b * r, self.a * q + self.b * s
        self.d, self.e = self.d * p + self.e * r, self.d * q + self.e * s

    def resize(self, width: int, height: int) -> None:
        """Stretch to another size."""
        self.transform(self.width / width, 0, 0, self.height / height)
        if self.window is not None:
            wide, high = width / self.width, height / self.height
            left, top, right, bottom = self.window
            self.window = left * wide, top * high, right * wide, bottom * high
        self.width, self.height = width, height

    def pad(self, size: int) -> None:
        """Add a border."""
        self.shift(-size, -size)
        self.window = size, size, size + self.width, size + self.height
        self.width, self.height = self.width + 2 * size, self.height + 2 * size


def plan(height: int, width: int, config: AugmentConfig, draws: Draws) -> Geometry:
    """Return the geometry of one sample from a source of this size."""
    canvas = _Canvas(width, height)
    if config.resize > 0:
        _resize_shorter(canvas, config.resize)
    if config.warps:
        _warp(canvas, config, draws)
    if config.pad_size:
        canvas.pad(config.pad_size)
    _crop(canvas, config, draws)
    if not config.warps:
        canvas.window = None  # the source has no pixels outside it anyway
    return _finish(canvas, config.random_mirror and draws[Draw.MIRROR] < _MIRRORED_BELOW)


def mirrors_of(draws: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return which of many samples are mirrored with random_mirror; each row of `draws` is one sample."""
    mirrors: NDArray[np.bool_] = draws[:, Draw.MIRROR] < _MIRRORED_BELOW
    return mirrors


def _resize_shorter(canvas: _Canvas, edge: int) -> None:
    shorter = min(canvas.width, canvas.height)
    canvas.resize(canvas.width * edge // shorter, canvas.height * edge // shorter)


def _warp(canvas: _Canvas, config: AugmentConfig, draws: Draws) -> None:
    """Shear, rotate, scale and change the aspect ratio about the centre; the canvas grows with the scale."""
    shear = _between(-config.max_random_shear_ratio, config.max_random_shear_ratio, draws[Draw.SHEAR])
    limit = config.max_random_rotate_angle
    angle = math.radians(int(draws[Draw.ANGLE] * (2 * limit + 1)) - limit)
    scale, ratio = 1.0, 1.0
    if not config.random_resized_crop:
        scale = _between(config.min_random_scale, config.max_random_scale, draws[Draw.SCALE])
        ratio = _between(*config.aspect_range, draws[Draw.RATIO])
    high = 2 * scale / (1 + ratio)
    wide = ratio * high
    cos, sin = math.cos(angle), math.sin(angle)
    p, q = high * cos - shear * sin * wide, high * sin + shear * cos * wide
    r, s = -sin * wide, cos * wide
    det = p * s - q * r
    new_width, new_height = max(1, int(scale * canvas.width)), max(1, int(scale * canvas.height))
    canvas.shift(canvas.width / 2, canvas.height / 2)
    canvas.transform(s / det, -q / det, -r / det, p / det)
    canvas.shift(-new_width / 2, -new_height / 2)
    canvas.width, canvas.height = new_width, new_height


def _crop(canvas: _Canvas, config: AugmentConfig, draws: Draws) -> None:
    height, width = config.shape[1:]
    if config.resizes_at_random and _random_resized(canvas, config, draws):
        return
    if config.max_crop_size > 0:
        side = int(_between(config.min_crop_size, config.max_crop_size + 1, draws[Draw.CROP_SIZE]))
        side = min(side, canvas.width, canvas.height)
        _cut(canvas, side, side, config.random_crop, draws[Draw.CROP_X], draws[Draw.CROP_Y])
        canvas.resize(width, height)
        return
    if canvas.width < width or canvas.height < height:
        grow = max(width / canvas.width, height / canvas.height)
        canvas.resize(max(width, round(canvas.width * grow)), max(height, round(canvas.height * grow)))
    _cut(canvas, width, height, config.random_crop, draws[Draw.CROP_X], draws[Draw.CROP_Y])


def _random_resized(canvas: _Canvas, config: AugmentConfig, draws: Draws) -> bool:
    """Try random areas and aspect ratios until one fits; return False if none of ten fits."""
    whole = canvas.width * canvas.height
    for first in range(Draw.TRIES, Draw.TRIES + _TRIES * _DRAWS_PER_TRY, _DRAWS_PER_TRY):
        by_area, by_ratio, by_swap, x, y = draws[first : first + _DRAWS_PER_TRY]
        area = whole * _between(config.min_random_area, config.max_random_area, by_area)
        ratio = _between(*config.aspect_range, by_ratio)
        width, height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if by_swap < 0.5:
            width, height = height, width
        if 0 < width <= canvas.width and 0 < height <= canvas.height:
            _cut(canvas, width, height, True, x, y)
            canvas.resize(config.shape[2], config.shape[1])
            return True
    return False


def _cut(canvas: _Canvas, width: int, height: int, random: bool, x: float, y: float) -> None:
    room_x, room_y = canvas.width - width, canvas.height - height
    canvas.shift(*((int(x * (room_x + 1)), int(y * (room_y + 1))) if random else (room_x // 2, room_y // 2)))
    canvas.width, canvas.height = width, height


def _between(low: float, high: float, draw: float) -> float:
    return low + (high - low) * draw


def _finish(canvas: _Canvas, mirror: bool) -> Geometry:
    a, b, c, d, e, f = canvas.a, canvas.b, canvas.c, canvas.d, canvas.e, canvas.f
    width, height = canvas.width, canvas.height
    window = None if canvas.window is None else _in_pixels(canvas.window, width, height)
    if abs(b) < 1e-12 and abs(d) < 1e-12:
        return Geometry((c, f, c + a * width, f + e * height), mirror, window=window)
    xs = [a * x + b * y + c for x in (0, width) for y in (0, height)]
    ys = [d * x + e * y + f for x in (0, width) for y in (0, height)]
    return Geometry((min(xs), min(ys), max(xs), max(ys)), mirror, (a, b, c, d, e, f), window)


def _in_pixels(window: tuple[float, float, float, float], width: int, height: int) -> tuple[int, int, int, int]:
    left, top, right, bottom = (round(edge) for edge in window)
    return max(left, 0), max(top, 0), min(right, width), min(bottom, height)
