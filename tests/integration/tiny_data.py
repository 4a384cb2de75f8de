"""The files that the example scripts read, in their own formats, with a few images each.

A class has a colour (or a grey) of its own, so that even a few steps can learn something. The folder looks like what
the scripts expect below their working directory, and like the /data of a machine that has ImageNet.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from echelon.data.records import Header, IndexedWriter, pack

NUM_TRAIN, NUM_VALIDATION = 32, 10
NUM_CLASSES = 10
IMAGENET = Path("imagenet") / "train-480-val-256-recordio"


def make_data(folder: Path) -> Path:
    """MNIST's idx files and CIFAR-10's record files under data/, ImageNet's under imagenet/."""
    data = folder / "data"
    data.mkdir(parents=True)
    for part, count in (("train", NUM_TRAIN), ("t10k", NUM_VALIDATION)):
        write_idx(data, part, count)
    write_records(data / "cifar10_train.rec", NUM_TRAIN, 32, 32)
    write_records(data / "cifar10_val.rec", NUM_VALIDATION, 32, 32)
    (folder / IMAGENET).mkdir(parents=True)
    write_records(folder / IMAGENET / "train.rec", 8, 480, 640)
    write_records(folder / IMAGENET / "val.rec", 1, 256, 340)
    return folder


def write_idx(folder: Path, part: str, count: int) -> None:
    """A pair of idx files: 28x28 images, grey as their class, and labels."""
    labels = _labels(count)
    images = np.repeat(labels * 25, 28 * 28) + _noise(count * 28 * 28)
    (folder / f"{part}-images-idx3-ubyte").write_bytes(
        struct.pack(">IIII", 0x803, count, 28, 28) + images.astype(np.uint8).tobytes()
    )
    (folder / f"{part}-labels-idx1-ubyte").write_bytes(
        struct.pack(">II", 0x801, count) + labels.astype(np.uint8).tobytes()
    )


def write_records(path: Path, count: int, height: int, width: int) -> None:
    """A record file with its index: JPEGs, coloured as their class."""
    with IndexedWriter(path) as writer:
        for number, label in enumerate(_labels(count)):
            colour = np.array([label * 25, 255 - label * 25, (label * 75) % 256])
            pixels = (colour + _noise(height * width * 3).reshape(height, width, 3)).clip(0, 255).astype(np.uint8)
            writer.write(number, pack(Header(float(label), number), bytes(simplejpeg.encode_jpeg(pixels, 90))))


def _labels(count: int) -> NDArray[np.int64]:
    return np.arange(count, dtype=np.int64) % NUM_CLASSES


def _noise(count: int) -> NDArray[np.int64]:
    return np.random.default_rng(count).integers(0, 20, count)
