"""Writes a record file of synthetic JPEGs that resemble photographs: 480x360, quality 95, about 60 KB each.

The time to decode a JPEG depends on its bits per block, so the images imitate the spectrum of photographs: noise at
octaves of size, weaker at finer octaves, mostly in brightness and a little in colour. Compared with 160 real
photographs of this size and quality, they have 2.9 bits per pixel (photographs: mean 2.8, from 2.0 to 3.9), of which 9
% are for colour (8 %). A hundred images are generated; the others are shifted copies, whose blocks and bits differ.
They are encoded as by `echelon data im2rec`, by default with restart markers.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from echelon.data.pack.im2rec import Encoding, save
from echelon.data.records import Header, IndexedWriter, pack

HEIGHT, WIDTH = 360, 480
ENCODING = Encoding(quality=95)
FINE, COLOUR = 1.7, 0.23
_DRAWN = 100
_OCTAVES = (4, 8, 16, 32, 64, 128)


def write_photographs(path: Path, count: int, seed: int = 0, encoding: Encoding = ENCODING) -> Path:
    """Write `count` images with labels 0 … 9 and their index; return the path."""
    generator = np.random.default_rng(seed)
    drawn = [_photograph(generator) for _ in range(min(count, _DRAWN))]
    with IndexedWriter(path) as writer:
        for number in range(count):
            shifted = np.roll(drawn[number % _DRAWN], (7 * number, 13 * number), (0, 1))
            payload = save(Image.fromarray(shifted), encoding)
            writer.write(number, pack(Header(float(number % 10), number), payload))
    return path


def _photograph(generator: np.random.Generator) -> NDArray[np.uint8]:
    bright = _octaves(generator) + FINE * generator.standard_normal((HEIGHT, WIDTH), np.float32)
    colours = np.stack([_octaves(generator) for _ in range(3)], -1)
    total = bright[..., None] + COLOUR * colours
    pixels: NDArray[np.uint8] = np.clip((total - total.mean()) / total.std() * 50 + 120, 0, 255).astype(np.uint8)
    return pixels


def _octaves(generator: np.random.Generator) -> NDArray[np.float32]:
    total = np.zeros((HEIGHT, WIDTH), np.float32)
    for octave in _OCTAVES:
        noise = generator.standard_normal((HEIGHT // octave + 2, WIDTH // octave + 2), np.float32)
        smooth = Image.fromarray(noise).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
        total += np.asarray(smooth) * np.float32(octave**0.7)
    return total
