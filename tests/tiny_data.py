"""The files that the example scripts read, in their formats, with a few images each.

Each class has its own colour (or grey), so that a few steps are enough to learn. The folder is laid out as the scripts
expect their working directory, and as /data of a machine with ImageNet.
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
    """Write MNIST's idx files and CIFAR-10's record files to data/, and ImageNet's to imagenet/."""
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
    """Write a pair of idx files: 28x28 images, grey by class, and labels."""
    labels = _labels(count)
    images = np.repeat(labels * 25, 28 * 28) + _noise(count * 28 * 28)
    (folder / f"{part}-images-idx3-ubyte").write_bytes(
        struct.pack(">IIII", 0x803, count, 28, 28) + images.astype(np.uint8).tobytes()
    )
    (folder / f"{part}-labels-idx1-ubyte").write_bytes(
        struct.pack(">II", 0x801, count) + labels.astype(np.uint8).tobytes()
    )


def write_records(path: Path, count: int, height: int, width: int) -> None:
    """Write a record file with its index: JPEGs, coloured by class."""
    with IndexedWriter(path) as writer:
        for number, label in enumerate(_labels(count)):
            colour = np.array([label * 25, 255 - label * 25, (label * 75) % 256])
            pixels = (colour + _noise(height * width * 3).reshape(height, width, 3)).clip(0, 255).astype(np.uint8)
            writer.write(number, pack(Header(float(label), number), bytes(simplejpeg.encode_jpeg(pixels, 90))))


def _labels(count: int) -> NDArray[np.int64]:
    return np.arange(count, dtype=np.int64) % NUM_CLASSES


def _noise(count: int) -> NDArray[np.int64]:
    return np.random.default_rng(count).integers(0, 20, count)
