"""The checkpoint file: a safetensors file that any reader of that format opens, with digests that detect damage.

Tensors are named `weights/…`, `optimizer/…` and `extra/…`. The run's metadata is JSON text in the safetensors metadata,
together with a digest of each tensor's bytes. One more digest, after the start of the header, covers the header itself;
it is computed with zeros in its own place. Every byte of the file is therefore covered, and an error names the damaged
tensor. This module does not choose file names.

The digests are XXH3 of 128 bits: they detect damage and not forgery, and take little of a core, which the training
beside a file that is written needs, too. Files with the slower BLAKE2b, which earlier versions wrote, are read, too.

Echelon makes the file itself instead of calling safetensors, for two reasons: the header digest needs a fixed offset,
and tensors are copied from any device straight to where the file is written from, so there is one copy.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeAlias

import msgspec
import torch
from torch import Tensor
from xxhash import xxh3_128

from echelon.atomic_file import AtomicFile
from echelon.errors import DataError, UsageError
from echelon.train.checkpoint.direct import aligned_memory, write_direct

Tensors: TypeAlias = dict[str, Tensor]
Metadata: TypeAlias = dict[str, Any]

_GROUPS = ("weights", "optimizer", "extra")
_DIGEST_BYTES = 16
_ALGORITHM = "xxh_128"
_DIGESTS: dict[str, Callable[[bytes | memoryview], str]] = {
    _ALGORITHM: lambda data: xxh3_128(data).hexdigest(),
    "blake2b": lambda data: blake2b(data, digest_size=_DIGEST_BYTES).hexdigest(),
}
_HEADER_STARTS = {f'{{"__metadata__":{{"{name}":"'.encode(): name for name in _DIGESTS}  # of equal length
_START_BYTES = max(map(len, _HEADER_STARTS))
_BLANK = "0" * (2 * _DIGEST_BYTES)
_LENGTH_BYTES = 8
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_BY_NAME = {name: dtype for dtype, name in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What one process needs to resume. The metadata is stored as JSON: tuples are loaded as lists, and NaN as None."""

    weights: Tensors
    optimizer: Tensors = field(default_factory=dict)
    extra: Tensors = field(default_factory=dict)
    metadata: Metadata = field(default_factory=dict)


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _FileMetadata(msgspec.Struct):
    """The safetensors metadata after the header's digest. It holds only strings: these are JSON texts."""

    echelon: str
    digests: str


@dataclass(frozen=True, slots=True)
class _Header:
    entries: dict[str, _Entry]
    digests: dict[str, str]
    metadata: Metadata
    algorithm: str = _ALGORITHM


class Image:
    """A copy of a checkpoint in memory, as the bytes of its file. Later steps do not change it.

    Tensors may be on any device, have any strides, and share memory; one that a file cannot hold raises UsageError.
    `before` is an image that is not needed any more: its memory is used again where it fits, because new memory costs
    several times as much as the copy itself.
    """

    def __init__(self, checkpoint: Checkpoint, before: Image | None = None) -> None:
        tensors = _sorted_tensors(checkpoint)
        entries: dict[str, _Entry] = {}
        end = 0
        for name, tensor in tensors.items():
            begin, end = end, end + tensor.numel() * tensor.element_size()
            entries[name] = _Entry(_DTYPES[tensor.dtype], tuple(tensor.shape), (begin, end))
        metadata = msgspec.json.decode(msgspec.json.encode(checkpoint.metadata))  # a copy, as it will be read
        self._header = _Header(entries, dict.fromkeys(tensors, _BLANK), metadata)
        self._header_bytes = len(_encode(self._header))  # final: all digests have the same length
        size = self._header_bytes + end
        memory = before._memory if before is not None else aligned_memory(0)
        self._memory: memoryview = memory if size <= len(memory) <= 2 * size else aligned_memory(size)
        self._data = self._memory[:size]
        for name, tensor in tensors.items():
            if tensor.numel():
                place = torch.frombuffer(self._part(name), dtype=tensor.dtype)
                place.view(tensor.shape).copy_(tensor.detach())

    def save(self, path: str | os.PathLike[str], is_abandoned: Callable[[], bool] = lambda: False) -> None:
        """Write the file atomically and flush it to the disk. Creates the folder if necessary.

        If `is_abandoned`, which is called now and then, returns True, no file appears, and Abandoned is raised.
        """

        def check() -> None:
            if is_abandoned():
                raise Abandoned

        path = Path(path)
        for name in self._header.digests:
            self._header.digests[name] = _DIGESTS[_ALGORITHM](self._part(name))
        self._data[: self._header_bytes] = _encode(self._header)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with AtomicFile(path) as file:
                write_direct(file.stream.fileno(), self._data, check)
                file.sync()
                check()
            _sync_folder(path.parent)
        except OSError as error:
            raise DataError(
                f"cannot write the checkpoint {path}: {error.strerror or error}; "
                "an existing file of this name is unchanged"
            ) from error

    def _part(self, name: str) -> memoryview:
        """Return the bytes of a tensor."""
        begin, end = self._header.entries[name].data_offsets
        return self._data[self._header_bytes + begin : self._header_bytes + end]


class Abandoned(Exception):
    """The file was not written, because the caller did not want it any more."""


def save(path: str | os.PathLike[str], checkpoint: Checkpoint) -> None:
    """Write a checkpoint atomically and flush it to the disk."""
    Image(checkpoint).save(path)


def load(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a file that `save` wrote and verify all digests; raises DataError if the file is missing or damaged."""
    with _opened(Path(path)) as stream:
        return _read(stream, Path(path))


def load_metadata(path: str | os.PathLike[str]) -> Metadata:
    """Return the run's metadata. Only the header is read and verified; raises DataError like `load`."""
    with _opened(Path(path)) as stream:
        return _read_header(stream, Path(path)).metadata


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with open(path, "rb") as stream:
            yield stream
    except FileNotFoundError:
        raise DataError(f"there is no checkpoint {path}; list the files in its folder: ls {path.parent}") from None
    except OSError as error:
        raise DataError(f"cannot read the checkpoint {path}: {error.strerror or error}") from error


def _sorted_tensors(checkpoint: Checkpoint) -> Tensors:
    """Return all tensors by their name in the file, widest types first, so that readers can map them aligned."""
    named = {f"{group}/{name}": tensor for group in _GROUPS for name, tensor in getattr(checkpoint, group).items()}
    for name, tensor in named.items():
        if tensor.dtype not in _DTYPES or tensor.layout is not torch.strided:
            kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
            raise UsageError(
                f"a checkpoint cannot hold {name}, a {tensor.layout} tensor of {tensor.dtype}; "
                f"only strided tensors of {kinds} can be saved"
            )
    return dict(sorted(named.items(), key=lambda item: (-item[1].element_size(), item[0])))


def _encode(header: _Header) -> bytes:
    """Return the length field and the header, padded to keep the tensors aligned, with the header digest filled in."""
    texts = (msgspec.json.encode(part).decode() for part in (header.metadata, header.digests))
    fields = {_ALGORITHM: _BLANK} | msgspec.to_builtins(_FileMetadata(*texts))
    text = msgspec.json.encode({"__metadata__": fields, **header.entries})
    text += b" " * (-len(text) % _LENGTH_BYTES)
    blank = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    return _with_header_digest(blank, _DIGESTS[_ALGORITHM](blank))


def _with_header_digest(header: bytes, digest: str) -> bytes:
    start = _LENGTH_BYTES + _START_BYTES
    return header[:start] + digest.encode() + header[start + len(digest) :]


def _sync_folder(folder: Path) -> None:
    """Flush the folder: a new file name is durable only once its folder is on the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read(stream: BinaryIO, path: Path) -> Checkpoint:
    header = _read_header(stream, path)
    groups: dict[str, Tensors] = {group: {} for group in _GROUPS}
    for name, entry in header.entries.items():
        tensor = torch.empty(entry.shape, dtype=_BY_NAME[entry.dtype])
        data = _bytes_of(tensor)
        stream.readinto(data)  # type: ignore[attr-defined]
        found, stored = _DIGESTS[header.algorithm](data), header.digests[name]
        if found != stored:
            _raise_damaged(path, f"the digest of tensor {name!r} is {found}, but the header says {stored}")
        group, _, own_name = name.partition("/")
        groups[group][own_name] = tensor
    return Checkpoint(**groups, metadata=header.metadata)


def _read_header(stream: BinaryIO, path: Path) -> _Header:
    """Read up to the first tensor, and verify the header's digest, its entries and the file size."""
    size = os.fstat(stream.fileno()).st_size
    start = stream.read(_LENGTH_BYTES + _START_BYTES + len(_BLANK))
    begins = start[_LENGTH_BYTES:][:_START_BYTES]
    algorithm = next((name for known, name in _HEADER_STARTS.items() if known.startswith(begins)), None)
    if algorithm is None:
        expected = " or ".join(repr(known.decode()) for known in _HEADER_STARTS)
        raise DataError(
            f"{path} is not an Echelon checkpoint: expected {expected} at byte 8, "
            f"got {begins.decode(errors='replace')!r}"
        )
    needed = _LENGTH_BYTES + int.from_bytes(start[:_LENGTH_BYTES], "little")
    if size < max(needed, len(start), _LENGTH_BYTES + _START_BYTES + len(_BLANK)):
        _raise_damaged(path, f"it is cut off at {size} bytes, but its header alone has {needed}")
    whole = start + stream.read(max(0, needed - len(start)))
    stored = start[-len(_BLANK) :].decode(errors="replace")
    found = _DIGESTS[algorithm](_with_header_digest(whole, _BLANK))
    if stored != found:
        _raise_damaged(path, f"the digest of its header is {found}, but the header says {stored}")
    header = _decode(whole[_LENGTH_BYTES:], path, algorithm)
    total = needed + max((entry.data_offsets[1] for entry in header.entries.values()), default=0)
    if size < total:
        _raise_damaged(path, f"it is cut off at {size} of {total} bytes")
    if size > total:
        _raise_damaged(path, f"it has {size} bytes, but its header describes {total}")
    return header


def _decode(text: bytes, path: Path, algorithm: str) -> _Header:
    """Parse the header; entries are in the order of the tensors in the file."""
    try:
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        file_metadata = msgspec.json.decode(raw.pop("__metadata__"), type=_FileMetadata)
        entries = {name: msgspec.json.decode(one, type=_Entry) for name, one in raw.items()}
        digests = msgspec.json.decode(file_metadata.digests, type=dict[str, str])
        run_metadata = msgspec.json.decode(file_metadata.echelon, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        _raise_damaged(path, f"its header cannot be read: {error}")
    _check_entries(entries, digests, path)
    return _Header(entries, digests, run_metadata, algorithm)


def _check_entries(entries: dict[str, _Entry], digests: dict[str, str], path: Path) -> None:
    """Reject inconsistent entries. The digest already excludes accidents; this guards against crafted headers."""
    end = 0
    for name, entry in entries.items():
        begin = end
        end += prod(entry.shape) * _BY_NAME[entry.dtype].itemsize if entry.dtype in _BY_NAME else 0
        known = entry.dtype in _BY_NAME and name.partition("/")[0] in _GROUPS and name in digests
        if not known or min(entry.shape, default=0) < 0 or entry.data_offsets != (begin, end):
            _raise_damaged(path, f"its header has an invalid entry for tensor {name!r}: {entry}")


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _raise_damaged(path: Path, what: str) -> NoReturn:
    raise DataError(f"the checkpoint {path} is damaged: {what}; use an earlier one")
