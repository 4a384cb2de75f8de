"""MXNet's .params file: a list of named arrays, as `mx.nd.save` writes it. All numbers are little-endian.

    u64 0x112, u64 0, u64 number of arrays, the arrays, u64 number of names, and for each name u64 length and its bytes

An array starts with a magic number that tells its version (since MXNet 1.0: 0xF993FAC9), followed by storage type,
shape, device, dtype and data. Before version 1 there is no magic number: the first word is the number of dimensions,
and dimensions have 32 bits. Version 3 has MXNet's `np_shape` semantics, in which no dimensions mean a scalar instead of
an array that was never filled.

Every length is compared with the bytes that are left before anything is allocated, so that a damaged file is an error,
never a crash. This module does not know what the names mean; `names` and `graph` do.
"""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from echelon.atomic_file import AtomicFile
from echelon.errors import DataError, UsageError
from echelon.train.checkpoint.format import Tensors

SUFFIX = ".params"

_LIST_MAGIC = 0x112
_V1, _V2, _V3 = 0xF993FAC8, 0xF993FAC9, 0xF993FACA
_CPU = (1, 0)  # device type and number
_DENSE = 0
_STORAGE = {_DENSE: "dense", 1: "row_sparse", 2: "csr"}
_MAX_DIMENSIONS = 32
_DTYPES = {  # by MXNet's number
    0: torch.float32,
    1: torch.float64,
    2: torch.float16,
    3: torch.uint8,
    4: torch.int32,
    5: torch.int8,
    6: torch.int64,
    7: torch.bool,
    8: torch.int16,
    9: torch.uint16,
    10: torch.uint32,
    11: torch.uint64,
    12: torch.bfloat16,
}
_NUMBERS = {dtype: number for number, dtype in _DTYPES.items()}


def load(path: str | os.PathLike[str]) -> Tensors:
    """Read the arrays of a file by name, in the order of the file."""
    try:
        with open(path, "rb") as stream:
            data = stream.read(struct.calcsize("<Q"))
            if data == struct.pack("<Q", _LIST_MAGIC):  # do not read a large file of another format
                stream.seek(0)
                data = stream.read()
    except FileNotFoundError:
        raise DataError(
            f"there is no file {os.fspath(path)}; list the files in its folder: ls {Path(path).parent}"
        ) from None
    except OSError as error:
        raise DataError(f"cannot read {os.fspath(path)}: {error.strerror or error}") from error
    return parse(data, os.fspath(path))


def save(path: str | os.PathLike[str], arrays: Mapping[str, Tensor]) -> None:
    """Write the file atomically, with arrays of version 2, which MXNet reads since 1.0."""
    chunks = list(encode(arrays))  # raises before a file is touched
    try:
        with AtomicFile(Path(path)) as file:
            for chunk in chunks:
                file.stream.write(chunk)
    except OSError as error:
        raise DataError(f"cannot write {os.fspath(path)}: {error.strerror or error}") from error


def parse(data: bytes, where: str = "the data") -> Tensors:
    """Return the arrays of a .params file by name. `where` names the data in errors."""
    reader = _Reader(data, where)
    (magic,) = reader.unpack("<Q", "the magic number")
    if magic != _LIST_MAGIC:
        reader.fail(f"it starts with {magic:#x}, not {_LIST_MAGIC:#x}")
    reader.unpack("<Q", "the header")  # reserved
    count = reader.count("arrays", smallest=4)
    arrays = [_parse_array(reader, f"array {number} of {count}") for number in range(1, count + 1)]
    num_names = reader.count("names", smallest=8)
    if num_names != count:
        reader.fail(f"it has {count} arrays and {num_names} names")
    names = [_parse_name(reader, number) for number in range(1, num_names + 1)]
    if reader.remaining:
        reader.fail(f"{reader.remaining} bytes follow its last name")
    named = dict(zip(names, arrays, strict=True))
    if len(named) < len(names):
        twice = Counter(names).most_common(1)[0][0]
        reader.fail(f"it has two arrays named {twice!r}")
    return named


def encode(arrays: Mapping[str, Tensor]) -> Iterator[bytes]:
    """Yield the bytes of a file with these arrays, one piece per array and one for the names."""
    yield struct.pack("<QQQ", _LIST_MAGIC, 0, len(arrays))
    for name, array in arrays.items():
        if array.dtype not in _NUMBERS or not array.dim() or not array.numel():
            raise UsageError(
                f"a .params file cannot hold {name!r}, a {_name(array.dtype)} tensor of shape {tuple(array.shape)}; "
                "it holds MXNet's dtypes, with at least one dimension and one element"
            )
        plain = array.detach().cpu().contiguous()
        shape = struct.pack(f"<Iii{plain.dim()}q", _V2, _DENSE, plain.dim(), *plain.shape)
        yield (
            shape
            + struct.pack("<iii", *_CPU, _NUMBERS[plain.dtype])
            + plain.flatten().view(torch.uint8).numpy().tobytes()
        )
    encoded = [name.encode() for name in arrays]
    yield struct.pack("<Q", len(encoded)) + b"".join(struct.pack("<Q", len(name)) + name for name in encoded)


class _Reader:
    """Reads numbers and bytes one after the other; running out of bytes is an error that says what is missing."""

    def __init__(self, data: bytes, where: str) -> None:
        self._data = memoryview(data)
        self._where = where
        self._at = 0

    @property
    def remaining(self) -> int:
        return len(self._data) - self._at

    def take(self, size: int, what: str) -> memoryview:
        if size > self.remaining:
            self.fail(f"{what} needs {size} bytes at byte {self._at}, but only {self.remaining} are left")
        self._at += size
        return self._data[self._at - size : self._at]

    def unpack(self, format: str, what: str) -> tuple[int, ...]:
        return struct.unpack(format, self.take(struct.calcsize(format), what))

    def count(self, what: str, smallest: int) -> int:
        """Read how many items follow; each has at least `smallest` bytes."""
        (number,) = self.unpack("<Q", f"the number of {what}")
        if number * smallest > self.remaining:
            self.fail(f"it cannot hold {number} {what} in its remaining {self.remaining} bytes")
        return number

    def fail(self, what: str) -> NoReturn:
        raise DataError(f"cannot read {self._where} as a .params file of MXNet: {what}")


def _parse_array(reader: _Reader, what: str) -> Tensor:
    (magic,) = reader.unpack("<I", what)
    if magic in (_V2, _V3):
        (storage,) = reader.unpack("<i", what)
        if storage != _DENSE:
            kind = _STORAGE.get(storage, f"of the unknown storage type {storage}")
            reader.fail(
                f"{what} is {kind}; only dense arrays can be read. Convert it in MXNet: array.tostype('default')"
            )
    shape = _parse_shape(reader, magic, what)
    _, _, number = reader.unpack("<iii", what)
    if number not in _DTYPES:
        reader.fail(f"{what} has the dtype number {number}; MXNet's are 0 to {max(_DTYPES)}")
    dtype = _DTYPES[number]
    data = reader.take(prod(shape) * dtype.itemsize, f"{what}, {_name(dtype)} of shape {shape},")
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy()).view(dtype).reshape(shape)


def _parse_shape(reader: _Reader, magic: int, what: str) -> tuple[int, ...]:
    """Return the shape of an array; `magic` is its version or, for a legacy array, the number of dimensions."""
    legacy = magic not in (_V1, _V2, _V3)
    dimensions = magic if legacy else reader.unpack("<i", what)[0]
    if legacy and dimensions > _MAX_DIMENSIONS:
        reader.fail(f"{what} starts with {magic:#x}, which is not a version of MXNet's arrays")
    if dimensions < 0 or (dimensions == 0 and magic != _V3):
        reader.fail(f"{what} has no shape, because it was never filled")
    if dimensions > _MAX_DIMENSIONS:
        reader.fail(f"{what} has {dimensions} dimensions, more than {_MAX_DIMENSIONS}")
    shape = reader.unpack(f"<{dimensions}{'I' if legacy else 'q'}", what)
    if min(shape, default=1) < 1:
        reader.fail(f"{what} has the shape {shape}, which has no elements")
    return shape


def _parse_name(reader: _Reader, number: int) -> str:
    (length,) = reader.unpack("<Q", f"the length of name {number}")
    try:
        return bytes(reader.take(length, f"name {number}")).decode()
    except UnicodeDecodeError as error:
        reader.fail(f"name {number} is not valid UTF-8 (byte {error.start})")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
