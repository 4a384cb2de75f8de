"""The checkpoint file: a safetensors file that any reader of that format opens, with digests that detect damage.

Tensors are named `weights/…`, `optimizer/…` and `extra/…`. The run's metadata is JSON text in the safetensors metadata,
together with a BLAKE2b digest of each tensor's bytes. One more digest, at a fixed offset, covers the header itself; it
is computed with zeros in its own place. Every byte of the file is therefore covered, and an error names the damaged
tensor. This module does not choose file names.

Echelon writes the file itself instead of calling safetensors, for two reasons: the header digest needs a fixed offset,
and copying one tensor at a time to the CPU limits the extra memory to the largest tensor. The digests take about one
second per gigabyte.
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

from echelon.atomic_file import AtomicFile
from echelon.errors import DataError, UsageError

Tensors: TypeAlias = dict[str, Tensor]
Metadata: TypeAlias = dict[str, Any]

_GROUPS = ("weights", "optimizer", "extra")
_HEADER_START = b'{"__metadata__":{"blake2b":"'
_DIGEST_BYTES = 16
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
    """The safetensors metadata, which holds only strings: two of these are JSON texts."""

    blake2b: str
    echelon: str
    digests: str


@dataclass(frozen=True, slots=True)
class _Header:
    entries: dict[str, _Entry]
    digests: dict[str, str]
    metadata: Metadata


class Abandoned(Exception):
    """The file was not written, because the caller of `save` did not want it any more."""


def save(
    path: str | os.PathLike[str], checkpoint: Checkpoint, is_abandoned: Callable[[], bool] = lambda: False
) -> None:
    """Write the file atomically and flush it to the disk. Creates the folder if necessary.

    Tensors may be on any device, have any strides, and share memory. If `is_abandoned`, which is called now and then,
    returns True, no file appears, and Abandoned is raised.
    """
    path = Path(path)
    tensors = _sorted_tensors(checkpoint)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with AtomicFile(path) as file:
            _write(file.stream, tensors, checkpoint.metadata, is_abandoned)
            file.sync()
            if is_abandoned():
                raise Abandoned
        _sync_folder(path.parent)
    except OSError as error:
        raise DataError(
            f"cannot write the checkpoint {path}: {error.strerror or error}; an existing file of this name is unchanged"
        ) from error


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


def check_tensors(checkpoint: Checkpoint) -> None:
    """Raise UsageError for a tensor that a file cannot hold."""
    _sorted_tensors(checkpoint)


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


def _write(stream: BinaryIO, tensors: Tensors, metadata: Metadata, is_abandoned: Callable[[], bool]) -> None:
    entries: dict[str, _Entry] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = _Entry(_DTYPES[tensor.dtype], tuple(tensor.shape), (begin, end))
    header = _Header(entries, dict.fromkeys(tensors, _BLANK), metadata)
    stream.write(
        _encode(header)
    )  # reserves the space: all digests have the same length, so the final header has this length too
    for name, tensor in tensors.items():
        if is_abandoned():
            raise Abandoned
        data = _bytes_of(tensor.detach().cpu().contiguous())
        header.digests[name] = _digest(data)
        stream.write(data)
    stream.seek(0)
    stream.write(_encode(header))


def _encode(header: _Header) -> bytes:
    """Return the length field and the header, padded to keep the tensors aligned, with the header digest filled in."""
    texts = (msgspec.json.encode(part).decode() for part in (header.metadata, header.digests))
    text = msgspec.json.encode({"__metadata__": _FileMetadata(_BLANK, *texts), **header.entries})
    text += b" " * (-len(text) % _LENGTH_BYTES)
    blank = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    return _with_header_digest(blank, _digest(blank))


def _with_header_digest(header: bytes, digest: str) -> bytes:
    start = _LENGTH_BYTES + len(_HEADER_START)
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
        found, stored = _digest(data), header.digests[name]
        if found != stored:
            _raise_damaged(path, f"the digest of tensor {name!r} is {found}, but the header says {stored}")
        group, _, own_name = name.partition("/")
        groups[group][own_name] = tensor
    return Checkpoint(**groups, metadata=header.metadata)


def _read_header(stream: BinaryIO, path: Path) -> _Header:
    """Read up to the first tensor, and verify the header's digest, its entries and the file size."""
    size = os.fstat(stream.fileno()).st_size
    start = stream.read(_LENGTH_BYTES + len(_HEADER_START) + len(_BLANK))
    if not _HEADER_START.startswith(start[_LENGTH_BYTES:][: len(_HEADER_START)]):
        begins = start[_LENGTH_BYTES:][: len(_HEADER_START)].decode(errors="replace")
        raise DataError(
            f"{path} is not an Echelon checkpoint: expected {_HEADER_START.decode()!r} at byte 8, got {begins!r}"
        )
    needed = _LENGTH_BYTES + int.from_bytes(start[:_LENGTH_BYTES], "little")
    if size < max(needed, len(start), _LENGTH_BYTES + len(_HEADER_START) + len(_BLANK)):
        _raise_damaged(path, f"it is cut off at {size} bytes, but its header alone has {needed}")
    whole = start + stream.read(max(0, needed - len(start)))
    stored, found = start[-len(_BLANK) :].decode(errors="replace"), _digest(_with_header_digest(whole, _BLANK))
    if stored != found:
        _raise_damaged(path, f"the digest of its header is {found}, but the header says {stored}")
    header = _decode(whole[_LENGTH_BYTES:], path)
    total = needed + max((entry.data_offsets[1] for entry in header.entries.values()), default=0)
    if size < total:
        _raise_damaged(path, f"it is cut off at {size} of {total} bytes")
    if size > total:
        _raise_damaged(path, f"it has {size} bytes, but its header describes {total}")
    return header


def _decode(text: bytes, path: Path) -> _Header:
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
    return _Header(entries, digests, run_metadata)


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


def _digest(data: bytes | memoryview) -> str:
    return blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


def _raise_damaged(path: Path, what: str) -> NoReturn:
    raise DataError(f"the checkpoint {path} is damaged: {what}; use an earlier one")
