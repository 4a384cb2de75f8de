"""Small images and record files for the tests of decoding and loading."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

from echelon.data.records import Header, IndexedWriter, Writer, pack

NUM_RECORDS = 23


def picture(seed: int, height: int = 60, width: int = 80) -> NDArray[np.uint8]:
    """Return a smooth colour image that is different for each seed."""
    coarse = np.random.default_rng(seed).integers(0, 255, (height // 10 + 2, width // 10 + 2, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))


def jpeg(pixels: NDArray[np.uint8], quality: int = 95) -> bytes:
    """Return the image as a baseline JPEG with 4:2:0 chroma."""
    return bytes(simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), quality, colorsubsampling="420"))


def encoded(pixels: NDArray[np.uint8] | Image.Image, kind: str, **options: object) -> bytes:
    """Return the image in any format of Pillow."""
    stream = io.BytesIO()
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    image.save(stream, kind, **options)
    return stream.getvalue()


def write_records(path: Path, payloads: Sequence[bytes], with_index: bool = True) -> Path:
    """Write a record file whose record k has label k."""
    records = [pack(Header(float(number), number), payload) for number, payload in enumerate(payloads)]
    if with_index:
        with IndexedWriter(path) as indexed:
            for number, record in enumerate(records):
                indexed.write(number, record)
    else:
        with Writer(path) as plain:
            for record in records:
                plain.write(record)
    return path


def make_records(path: Path, count: int = NUM_RECORDS, make: Callable[[int], bytes] | None = None) -> Path:
    """Write a record file of different JPEGs."""
    return write_records(path, [(make or (lambda seed: jpeg(picture(seed))))(seed) for seed in range(count)])
