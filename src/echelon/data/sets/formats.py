"""The files in which CIFAR and MNIST are published, and their readers.

Owns the file names and byte formats: CIFAR-10 and CIFAR-100 in the binary and the python version, and MNIST's idx,
plain or gzipped. A truncated file raises a RecordError; with `on_bad`, the images before the end are returned.

CIFAR's files do not contain their number of records. A file that is truncated between two records is recognised by the
files beside it: if one of them has its published size, all must have it. Other sets may have any number except 0.
"""

from __future__ import annotations

import gzip
import io
import math
import pickle
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from echelon.data.images.decode import Pixels
from echelon.data.records.class_file import ClassNames
from echelon.data.records.file import RecordError, report
from echelon.data.sets.class_names import CIFAR10, CIFAR100, DIGITS, FASHION
from echelon.errors import DataError, UsageError

OnBad: TypeAlias = Callable[[DataError], None] | None

_SIDE = 32
_PIXEL_BYTES = 3 * _SIDE * _SIDE
_IDX_IMAGES, _IDX_LABELS = 0x803, 0x801
_CIFAR_RECORDS, _CIFAR100_TRAIN = 10_000, ("train.bin", 50_000)


class ImageBlock(NamedTuple):
    """Images of one file, uint8 n x h x w (grey) or n x h x w x 3, and a class number for each.

    Record k of the file at `path` begins at byte `head_bytes + k * record_bytes`.
    """

    images: Pixels
    labels: NDArray[np.int64]
    path: Path
    head_bytes: int = 0
    record_bytes: int = 0


@dataclass(frozen=True)
class FileFormat:
    """How a data set is stored in a folder. On disk, a file name may have the suffix .gz too."""

    name: str
    folder: str
    train: tuple[str, ...]
    val: tuple[str, ...]
    classes: ClassNames
    read: Callable[[list[Path], int, OnBad], Iterator[ImageBlock]]

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.classes)


def read_cifar_binary(paths: list[Path], num_classes: int, on_bad: OnBad) -> Iterator[ImageBlock]:
    """Read records of a label, then 3 x 32 x 32 pixels; CIFAR-100 has a coarse label before the fine one."""
    label_bytes = 1 if num_classes == 10 else 2
    size = label_bytes + _PIXEL_BYTES
    for path in paths:
        rows = _rows(path, read_decompressed(path), 0, size, on_bad, _expected_records(path, size))
        labels = rows[:, label_bytes - 1].astype(np.int64)
        yield ImageBlock(_planes_last(rows[:, label_bytes:]), labels, path, record_bytes=rows.shape[1])


def _expected_records(path: Path, size: int) -> int | None:
    """Return how many records of `size` bytes a file should have, or None if that is unknown (see above)."""
    if path.stat().st_size >= _published(path) * size:
        return None
    is_whole = any(file.stat().st_size == _published(file) * size for file in path.parent.glob("*.bin"))
    return _published(path) if is_whole else None


def _published(path: Path) -> int:
    name, count = _CIFAR100_TRAIN
    return count if path.name.removesuffix(".gz") == name else _CIFAR_RECORDS


def read_cifar_python(paths: list[Path], num_classes: int, on_bad: OnBad) -> Iterator[ImageBlock]:
    """Read pickled dicts of `data` n x 3072 and `labels` or `fine_labels`."""
    for path in paths:
        try:
            table = _ArraysOnly(io.BytesIO(read_decompressed(path)), encoding="bytes").load()
            pixels = np.asarray(table[b"data"])
            labels = np.asarray(table[b"labels" if num_classes == 10 else b"fine_labels"], np.int64)
        except Exception as error:  # a damaged pickle may raise anything
            raise DataError(f"{path}: not a CIFAR batch of the python version ({error})") from error
        if pixels.dtype != np.uint8 or pixels.shape != (len(labels), _PIXEL_BYTES):
            raise DataError(
                f"{path}: expected {len(labels)} x {_PIXEL_BYTES} bytes, one row per label, "
                f"got {' x '.join(map(str, pixels.shape))} of {pixels.dtype}"
            )
        if not len(labels):
            raise DataError(f"{path}: this CIFAR batch has no images; download the file again")
        yield ImageBlock(_planes_last(pixels), labels, path)


class _ArraysOnly(pickle.Unpickler):
    """Loads only plain values and numpy arrays, so that a downloaded file cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "_reconstruct" and module.endswith(".multiarray"):
            return np.ndarray.__reduce__(np.empty(0))[0]
        if (module, name) in {("numpy", "ndarray"), ("numpy", "dtype")}:
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):
            return lambda text, encoding: text.encode(encoding)
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which a CIFAR file never does")


def read_idx(paths: list[Path], num_classes: int, on_bad: OnBad) -> Iterator[ImageBlock]:
    """Read a file of images and a file of labels: big-endian magic, sizes, then bytes."""
    images, num_images = _idx_array(paths[0], _IDX_IMAGES, 3, on_bad)
    labels, num_labels = _idx_array(paths[1], _IDX_LABELS, 1, on_bad)
    if num_images != num_labels:
        raise DataError(
            f"{paths[0]} has {num_images} images, but {paths[1]} has {num_labels} labels; they do not belong together"
        )
    both = min(len(images), len(labels))
    yield ImageBlock(images[:both], labels[:both].astype(np.int64), paths[1], head_bytes=8, record_bytes=1)


def _idx_array(path: Path, magic: int, num_sizes: int, on_bad: OnBad) -> tuple[Pixels, int]:
    """Return the records that the file has, and the number that its header states."""
    data = read_decompressed(path)
    head = 4 + 4 * num_sizes
    if len(data) < head or struct.unpack_from(">I", data)[0] != magic:
        raise DataError(
            f"{path}: expected an idx file that begins with {magic:08x}, got {data[:4].hex() or 'an empty file'}"
        )
    count, *shape = struct.unpack_from(f">{num_sizes}I", data, 4)
    size, follow = math.prod(shape), len(data) - head
    if not count or not 0 < size <= follow:
        sizes = " x ".join(map(str, (count, *shape)))
        raise DataError(f"{path}: its header states {sizes} bytes, but {follow} follow; download the file again")
    return _rows(path, data, head, size, on_bad, count).reshape(-1, *shape), count


def _rows(path: Path, data: bytes, head: int, size: int, on_bad: OnBad, expected: int | None = None) -> Pixels:
    """Return the bytes after `head` as rows of `size`; report a file that is too short."""
    count, rest = divmod(len(data) - head, size)
    if rest or count < (expected or 1):
        place = f"after {rest} of the record's {size} bytes" if rest else "here"
        should = "" if expected is None else f", and should have {expected} records, {head + expected * size} bytes"
        reason = f"the file ends {place}: it has {len(data)} bytes{should}; download it again"
        fault = RecordError(path, head + count * size, count, reason)
        report(fault, on_bad)
    count = count if expected is None else min(count, expected)
    return np.frombuffer(data, np.uint8, count * size, head).reshape(count, size)


def _planes_last(rows: Pixels) -> Pixels:
    return np.ascontiguousarray(rows.reshape(-1, 3, _SIDE, _SIDE).transpose(0, 2, 3, 1))


def read_decompressed(path: Path) -> bytes:
    """Return the contents of a file, decompressed if its suffix is .gz."""
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {error}; download it again") from error


_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
_MNIST = FileFormat(
    "mnist (idx)",
    "MNIST/raw",
    ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
    DIGITS,
    read_idx,
)
_FORMATS = (
    FileFormat(
        "cifar10 (binary)",
        "cifar-10-batches-bin",
        tuple(f"{name}.bin" for name in _BATCHES),
        ("test_batch.bin",),
        CIFAR10,
        read_cifar_binary,
    ),
    FileFormat("cifar10 (python)", "cifar-10-batches-py", _BATCHES, ("test_batch",), CIFAR10, read_cifar_python),
    FileFormat("cifar100 (binary)", "cifar-100-binary", ("train.bin",), ("test.bin",), CIFAR100, read_cifar_binary),
    FileFormat("cifar100 (python)", "cifar-100-python", ("train",), ("test",), CIFAR100, read_cifar_python),
    _MNIST,
    replace(_MNIST, name="fashion-mnist (idx)", folder="FashionMNIST/raw", classes=FASHION),
)


FORMATS = {one.name: one for one in _FORMATS}


def find_format(source: Path) -> tuple[FileFormat, dict[str, list[Path]]]:
    """Recognise the data set in a folder by its file names; return its format and the files of its splits."""
    if source.is_file():
        raise UsageError(f"{source} is a file; expected the folder with the data set. Unpack an archive first (tar xf)")
    if not source.is_dir():
        raise UsageError(
            f"no folder {source}; expected the folder with the data set's files; echelon data get downloads some sets"
        )
    for file_format in FORMATS.values():
        for folder in (source, source / file_format.folder):
            if splits := find_splits(folder, file_format):
                return file_format, splits
    known = "\n".join(f"  {one.name}: {' '.join(one.train + one.val)}" for one in FORMATS.values())
    raise DataError(f"no known data set in {source}; looked for\n{known}")


def find_splits(folder: Path, file_format: FileFormat) -> dict[str, list[Path]]:
    """Return the files of train, val, or both, in a folder; raise DataError if a split lacks some of its files."""
    splits = {"train": _present(folder, file_format.train), "val": _present(folder, file_format.val)}
    _check_complete(folder, file_format, splits)
    return {name: files for name, files in splits.items() if files}


def _present(folder: Path, names: tuple[str, ...]) -> list[Path]:
    files = (find_file(folder, name) for name in names)
    return [file for file in files if file is not None]


def find_file(folder: Path, name: str) -> Path | None:
    """Return the path of a file; it may have the suffix .gz, or a dot as in train-images.idx3-ubyte."""
    names = (name, name + ".gz", name.replace("-idx", ".idx"), name.replace("-idx", ".idx") + ".gz")
    return next((folder / each for each in names if (folder / each).is_file()), None)


def _check_complete(folder: Path, file_format: FileFormat, splits: dict[str, list[Path]]) -> None:
    for split, names in (("train", file_format.train), ("val", file_format.val)):
        missing = [name for name in names if splits[split] and find_file(folder, name) is None]
        if missing:
            raise DataError(
                f"{folder} looks like {file_format.name}, but {' '.join(missing)} is missing; add it and try again"
            )
