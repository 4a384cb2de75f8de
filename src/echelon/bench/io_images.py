"""A record file of JPEGs to measure with, where none is given: about 480x360, quality 95, 60 KB, like a photograph's.

A photograph's spectrum falls off with frequency, which decides how many bits its blocks have, and those decide how long
decoding takes. So the images are sums of noise at octaves of size, the finer the fainter. A hundred are drawn; the rest
are those, moved around, which gives other blocks and other bits.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

from echelon.data.recordio import Header, IndexedWriter, pack

HEIGHT, WIDTH, QUALITY = 360, 480, 95
_DRAWN = 100
_OCTAVES = (4, 8, 16, 32, 64, 128)


def write_photographs(path: Path, count: int, seed: int = 0) -> Path:
    """Write `count` images with labels 0 ... 9, and their index."""
    generator = np.random.default_rng(seed)
    drawn = [_photograph(generator) for _ in range(min(count, _DRAWN))]
    with IndexedWriter(path) as writer:
        for number in range(count):
            moved = np.roll(drawn[number % _DRAWN], (7 * number, 13 * number), (0, 1))
            encoded = simplejpeg.encode_jpeg(np.ascontiguousarray(moved), QUALITY, colorsubsampling="420")
            writer.write(number, pack(Header(float(number % 10), number), encoded))
    return path


def _photograph(generator: np.random.Generator) -> NDArray[np.uint8]:
    total = 2 * generator.standard_normal((HEIGHT, WIDTH, 3), np.float32)
    for octave in _OCTAVES:
        shape = (3, HEIGHT // octave + 2, WIDTH // octave + 2)
        for channel, noise in enumerate(generator.standard_normal(shape, np.float32)):
            smooth = Image.fromarray(noise).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
            total[..., channel] += np.asarray(smooth) * octave**0.7
    centred = (total - total.mean()) / total.std()
    pixels: NDArray[np.uint8] = np.clip(centred * 50 + 120, 0, 255).astype(np.uint8)
    return pixels
