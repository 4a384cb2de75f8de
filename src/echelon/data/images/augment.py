"""Augments one image: decode, sample, recolour, mirror, and normalise into a batch.

`geometry` decides which pixels are needed; this module moves as few pixels as possible. For a 224x224 crop on one core,
after decoding: a plain crop is a view and takes no time, a resized crop of whole source pixels is one pass of torch's
SIMD kernel for uint8 (0.2 ms), one that begins inside a source pixel is Pillow's resize (0.9 ms), because torch's has
no such boxes, a rotated one is Pillow's affine transform (1.3 ms). Mirroring is a negative stride in the
copy that separates the colour planes. Pixels stay uint8 until they are normalised into the batch (0.1 ms). torch is
imported only where it is used, so a decode process that only crops and mirrors starts without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from echelon.data.images.config import AugmentConfig
from echelon.data.images.decode import Decoder, Pixels, Region, inspect
from echelon.data.images.geometry import Draws, Geometry, filter_reach, is_whole, plan
from echelon.data.records.frame import Bytes

Recolour: TypeAlias = Callable[[Pixels, AugmentConfig, Draws], Pixels]

_CHANNEL_MODES = {1: "L", 3: "RGB", 4: "CMYK"}  # not RGBA, where Pillow weights the colours with the fourth channel


class Augmenter:
    """Augments images. Each thread needs its own; a result is valid until the next call."""

    def __init__(self, config: AugmentConfig, fast: bool = True) -> None:
        self._config = config
        self._decoder = Decoder(config.shape[0], fast)
        self._recolour: Recolour | None = None
        if config.changes_colour:
            from echelon.data.images.colour import recolour

            self._recolour = recolour

    def augment(self, payload: Bytes | Pixels, draws: Draws) -> Pixels:
        """Return the pixels (height, width, channels) before normalisation, possibly as a view with unusual strides."""
        config = self._config
        height, width = config.shape[1:]
        if isinstance(payload, np.ndarray):
            region = Region(payload)
            geometry = plan(payload.shape[0], payload.shape[1], config, draws)
        else:
            info = inspect(payload)
            geometry = plan(info.height, info.width, config, draws)
            shrink = geometry.shrink(height, width)
            region = self._decoder.decode_region(payload, info, shrink, geometry.reach(shrink, height, width))
        pixels = sample(region, geometry, (height, width), config.fill_value)
        if geometry.window is not None:
            pixels = fill_outside(pixels, geometry.window, config.fill_value)
        if self._recolour is not None:
            pixels = self._recolour(pixels, config, draws)
        return pixels[:, ::-1] if geometry.mirror else pixels


@dataclass(frozen=True, slots=True)
class Span:
    """One dimension of a box: from `low` to `high` of an image of `limit` pixels, sampled as `size` pixels."""

    low: float
    high: float
    limit: int
    size: int

    @property
    def is_whole(self) -> bool:
        """Whether it begins and ends between two pixels."""
        return is_whole(self.low) and is_whole(self.high) and round(self.low) < round(self.high)

    @property
    def is_inside(self) -> bool:
        """Whether the image has all of it, but for rounding errors."""
        return self.low >= 0 and self.high <= self.limit

    def inside(self) -> tuple[slice, Span]:
        """Return the output pixels that show the image, and where they are in it."""
        pixel = (self.high - self.low) / self.size
        first = max(0, round(-self.low / pixel))
        last = min(self.size, round((self.limit - self.low) / pixel))
        low, high = max(0.0, self.low + first * pixel), min(float(self.limit), self.low + last * pixel)
        return slice(first, last), Span(low, high, self.limit, last - first)

    def pixels(self, cuts_first: bool) -> slice:
        """Return the pixels of the image that are needed; if it was cut out first, those around it are not."""
        beyond = 0.0 if cuts_first else filter_reach((self.high - self.low) / self.size)
        return slice(max(0, math.floor(self.low - beyond)), min(self.limit, math.ceil(self.high + beyond)))


def sample(region: Region, geometry: Geometry, size: tuple[int, int], fill: int) -> Pixels:
    """Return the output pixels, sampled from the decoded region of the source."""
    image, shrink = region.pixels, region.shrink
    if geometry.matrix is not None:
        a, b, c, d, e, f = (value / shrink for value in geometry.matrix)
        return _sample_affine(image, (a, b, c - region.left, d, e, f - region.top), size, fill)
    left, top, right, bottom = (edge / shrink for edge in geometry.box)
    across = Span(left - region.left, right - region.left, image.shape[1], size[1])
    down = Span(top - region.top, bottom - region.top, image.shape[0], size[0])
    if across.is_inside and down.is_inside:
        return _resample(image, down, across, geometry.is_whole)
    return _sample_beyond(image, down, across, geometry.is_whole, fill)


def fill_outside(pixels: Pixels, window: tuple[int, int, int, int], fill: int) -> Pixels:
    """Return the image with the pixels outside the window replaced by the fill value."""
    left, top, right, bottom = window
    out = np.full(pixels.shape, fill, np.uint8)
    if left < right and top < bottom:
        out[top:bottom, left:right] = pixels[top:bottom, left:right]
    return out


def _sample_beyond(image: Pixels, down: Span, across: Span, cuts_first: bool, fill: int) -> Pixels:
    """Sample a box that extends beyond the image; the output outside the image is filled."""
    out = np.full((down.size, across.size, image.shape[2]), fill, np.uint8)
    (rows, down), (columns, across) = down.inside(), across.inside()
    if down.size > 0 and across.size > 0:
        out[rows, columns] = _resample(image, down, across, cuts_first)
    return out


def _resample(image: Pixels, down: Span, across: Span, cuts_first: bool) -> Pixels:
    """Sample a box inside the image. `cuts_first`: the pixels around the box do not count."""
    if down.is_whole and across.is_whole:
        rows, columns = slice(round(down.low), round(down.high)), slice(round(across.low), round(across.high))
        return resize(image[rows, columns], (down.size, across.size))
    rows, columns = down.pixels(cuts_first), across.pixels(cuts_first)
    part = image[rows, columns]
    box = (
        across.low - columns.start,
        down.low - rows.start,
        min(across.high - columns.start, part.shape[1]),
        min(down.high - rows.start, part.shape[0]),
    )
    mode = _CHANNEL_MODES[part.shape[2]]
    source = Image.frombuffer(mode, part.shape[1::-1], np.ascontiguousarray(part), "raw", mode, 0, 1)
    sampled = source.resize((across.size, down.size), Image.Resampling.BILINEAR, box)
    return np.asarray(sampled).reshape(down.size, across.size, part.shape[2])


def _sample_affine(image: Pixels, matrix: tuple[float, ...], size: tuple[int, int], fill: int) -> Pixels:
    grey = image.shape[2] == 1
    source = Image.fromarray(image[:, :, 0] if grey else image)
    sampled = source.transform(
        size[::-1],
        Image.Transform.AFFINE,
        matrix,
        Image.Resampling.BILINEAR,
        fillcolor=fill if grey else (fill,) * image.shape[2],
    )
    return np.asarray(sampled).reshape(*size, image.shape[2])


def resize(pixels: Pixels, size: tuple[int, int]) -> Pixels:
    """Return the image resized to (height, width), bilinear with antialiasing; the same object if the size fits."""
    height, width, channels = pixels.shape
    if (height, width) == size:
        return pixels
    import torch

    if not pixels.flags.writeable:  # torch warns about read-only memory
        pixels = pixels.copy()
    # The strides must be channels-last even for the batch dimension; otherwise torch uses a path half as fast.
    row, column, channel = pixels.strides
    strides = (pixels.shape[0] * row, channel, row, column)
    source = torch.as_strided(torch.from_numpy(pixels), (1, channels, height, width), strides)
    scaled = torch.nn.functional.interpolate(source, size=size, mode="bilinear", antialias=True)
    result: Pixels = scaled[0].permute(1, 2, 0).numpy()
    return result


class Normaliser:
    """Converts uint8 pixels to the floats that a network gets: (pixel - mean) / std. Each thread needs its own."""

    def __init__(self, config: AugmentConfig) -> None:
        channels = config.shape[0]
        mean, std = ((*values, fill)[:channels] for values, fill in ((config.rgb_mean, 0.0), (config.rgb_std, 1.0)))
        self.scale = np.array([1 / one for one in std], np.float32).reshape(-1, 1, 1)
        self.offset = np.array([-m / s for m, s in zip(mean, std, strict=True)], np.float32).reshape(-1, 1, 1)
        self._scales = any(one != 1 for one in std)
        self._planes = np.empty(config.shape, np.uint8)

    def into(self, out: NDArray[np.float32], pixels: Pixels) -> None:
        """Write one image (height, width, channels), with any strides, to `out` as float planes."""
        np.copyto(self._planes, pixels.transpose(2, 0, 1))
        np.copyto(out, self._planes)
        if self._scales:
            np.multiply(out, self.scale, out=out)
        np.add(out, self.offset, out=out)
