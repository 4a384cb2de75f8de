"""Augments one image: decode, sample, recolour, mirror, and normalise into a batch.

`geometry` decides which pixels are needed; this module moves as few pixels as possible. For a 224x224 crop on one core,
after decoding: a plain crop is a view and takes no time, a resized crop is one pass of torch's SIMD kernel for uint8
(0.2 ms; Pillow takes 0.9), a rotated one is Pillow's affine transform (1.3 ms). Mirroring is a negative stride in the
copy that separates the colour planes. Pixels stay uint8 until they are normalised into the batch (0.1 ms). torch is
imported only where it is used, so a decode process that only crops and mirrors starts without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from echelon.data.images.config import AugmentConfig
from echelon.data.images.decode import Decoder, Pixels, Region, inspect
from echelon.data.images.geometry import Draws, Geometry, plan
from echelon.data.records.frame import Bytes

Recolour: TypeAlias = Callable[[Pixels, AugmentConfig, Draws], Pixels]


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
            region = self._decoder.decode_region(payload, info, shrink, geometry.reach(shrink))
        pixels = sample(region, geometry, (height, width), config.fill_value)
        if geometry.window is not None:
            pixels = fill_outside(pixels, geometry.window, config.fill_value)
        if self._recolour is not None:
            pixels = self._recolour(pixels, config, draws)
        return pixels[:, ::-1] if geometry.mirror else pixels


def sample(region: Region, geometry: Geometry, size: tuple[int, int], fill: int) -> Pixels:
    """Return the output pixels, sampled from the decoded region of the source."""
    image, shrink = region.pixels, region.shrink
    if geometry.matrix is not None:
        a, b, c, d, e, f = (value / shrink for value in geometry.matrix)
        return _sample_affine(image, (a, b, c - region.left, d, e, f - region.top), size, fill)
    left, top, right, bottom = (round(edge / shrink) for edge in geometry.box)
    left, right, top, bottom = left - region.left, right - region.left, top - region.top, bottom - region.top
    right, bottom = max(right, left + 1), max(bottom, top + 1)
    if left < 0 or top < 0 or right > image.shape[1] or bottom > image.shape[0]:
        return _sample_beyond(image, (left, top, right, bottom), size, fill)
    return resize(image[top:bottom, left:right], size)


def fill_outside(pixels: Pixels, window: tuple[int, int, int, int], fill: int) -> Pixels:
    """Return the image with the pixels outside the window replaced by the fill value."""
    left, top, right, bottom = window
    out = np.full(pixels.shape, fill, np.uint8)
    if left < right and top < bottom:
        out[top:bottom, left:right] = pixels[top:bottom, left:right]
    return out


def _sample_beyond(image: Pixels, box: tuple[int, int, int, int], size: tuple[int, int], fill: int) -> Pixels:
    """Sample a box that extends beyond the image; the output outside the image is filled."""
    left, top, right, bottom = box
    out = np.full((*size, image.shape[2]), fill, np.uint8)
    spans = []
    for low, high, limit, length in ((top, bottom, image.shape[0], size[0]), (left, right, image.shape[1], size[1])):
        scale = length / (high - low)
        first, last = max(low, 0), min(high, limit)
        to_first, to_last = round((first - low) * scale), round((last - low) * scale)
        if last <= first or to_last <= to_first:
            return out
        spans.append((slice(first, last), slice(to_first, to_last), to_last - to_first))
    (rows, to_rows, height), (columns, to_columns, width) = spans
    out[to_rows, to_columns] = resize(image[rows, columns], (height, width))
    return out


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
