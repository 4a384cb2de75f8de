"""The bytes of a checkpoint: one safetensors file that any reader of the format opens, and that knows its own damage.

Tensors are named `weights/…`, `optimizer/…` and `extra/…`; the facts are JSON text in the metadata. The metadata also
has a BLAKE2b digest of every tensor's bytes and, at a fixed place, one of the header itself, taken with zeros in that
place. So every byte of the file is covered, and the tensor with a wrong one is named. Nothing here knows file names.

The file is written here and not by safetensors' own writer: the header's place must be fixed, and a tensor at a time is
copied to the processor, so that saving takes the memory of the largest tensor and not of the model. The digests cost
about a second a gigabyte.
"""

from __future__ import annotations

import os
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

_GROUPS = ("weights", "optimizer", "extra")
_HEAD = b'{"__metadata__":{"blake2b":"'
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
class Snapshot:
    """What a worker needs to go on. The facts are JSON: tuples come back as lists, and NaN as None."""

    weights: Tensors
    optimizer: Tensors = field(default_factory=dict)
    extra: Tensors = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Metadata(msgspec.Struct):
    blake2b: str
    echelon: str
    digests: str


@dataclass(frozen=True, slots=True)
class _Header:
    entries: dict[str, _Entry]
    digests: dict[str, str]
    facts: dict[str, Any]


def save(path: str | os.PathLike[str], snapshot: Snapshot) -> None:
    """Write a file that appears whole or not at all, and is on the disk when this returns. Makes its folder.

    Tensors may be on any device, of any strides, and share memory.
    """
    path = Path(path)
    tensors = _in_order(snapshot)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with AtomicFile(path) as file:
            _write(file.stream, tensors, snapshot.facts)
        _sync_folder(path.parent)
    except OSError as error:
        raise DataError(
            f"cannot write the checkpoint {path}: {error.strerror or error}; an older file of this name is as it was"
        ) from error


def load(path: str | os.PathLike[str]) -> Snapshot:
    """Read a file that `save` wrote, every byte checked; DataError says what is wrong with it."""
    path = Path(path)
    try:
        with open(path, "rb") as stream:
            return _read(stream, path)
    except FileNotFoundError:
        raise DataError(f"there is no checkpoint {path}; look at the files beside it: ls {path.parent}") from None
    except OSError as error:
        raise DataError(f"cannot read the checkpoint {path}: {error.strerror or error}") from error


def _in_order(snapshot: Snapshot) -> Tensors:
    """All tensors by their names in the file, wide types first: readers that map the file need them aligned."""
    named = {f"{group}/{name}": tensor for group in _GROUPS for name, tensor in getattr(snapshot, group).items()}
    for name, tensor in named.items():
        if tensor.dtype not in _DTYPES or tensor.layout is not torch.strided:
            kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
            raise UsageError(
                f"a checkpoint cannot hold {name}, a {tensor.layout} tensor of {tensor.dtype}; "
                f"it takes strided tensors of {kinds}"
            )
    return dict(sorted(named.items(), key=lambda item: (-item[1].element_size(), item[0])))


def _write(stream: BinaryIO, tensors: Tensors, facts: dict[str, Any]) -> None:
    entries: dict[str, _Entry] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = _Entry(_DTYPES[tensor.dtype], tuple(tensor.shape), (begin, end))
    header = _Header(entries, dict.fromkeys(tensors, _BLANK), facts)
    stream.write(_encode(header))  # keeps the place: digests have one length, so the last header is as long
    for name, tensor in tensors.items():
        copied = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
        data = _bytes_of(copied)
        header.digests[name] = _digest(data)
        stream.write(data)
    stream.seek(0)
    stream.write(_encode(header))


def _encode(header: _Header) -> bytes:
    """The length and the header, which is padded to keep the tensors aligned, and sealed."""
    texts = (msgspec.json.encode(part).decode() for part in (header.facts, header.digests))
    text = msgspec.json.encode({"__metadata__": _Metadata(_BLANK, *texts), **header.entries})
    text += b" " * (-len(text) % _LENGTH_BYTES)
    blank = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    return _with_seal(blank, _digest(blank))


def _with_seal(header: bytes, seal: str) -> bytes:
    at = _LENGTH_BYTES + len(_HEAD)
    return header[:at] + seal.encode() + header[at + len(seal) :]


def _sync_folder(folder: Path) -> None:
    """A new name is on the disk only when its folder is."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read(stream: BinaryIO, path: Path) -> Snapshot:
    header = _read_header(stream, path)
    groups: dict[str, Tensors] = {group: {} for group in _GROUPS}
    for name, entry in header.entries.items():
        tensor = torch.empty(entry.shape, dtype=_BY_NAME[entry.dtype])
        data = _bytes_of(tensor)
        stream.readinto(data)  # type: ignore[attr-defined]
        if _digest(data) != header.digests[name]:
            _bad(path, f"the digest of tensor {name!r} is {_digest(data)}, but its header has {header.digests[name]}")
        group, _, own_name = name.partition("/")
        groups[group][own_name] = tensor
    return Snapshot(**groups, facts=header.facts)


def _read_header(stream: BinaryIO, path: Path) -> _Header:
    """Read up to the first tensor; what is returned agrees with itself and with the file's size."""
    size = os.fstat(stream.fileno()).st_size
    start = stream.read(_LENGTH_BYTES + len(_HEAD) + len(_BLANK))
    if not _HEAD.startswith(start[_LENGTH_BYTES:][: len(_HEAD)]):
        begins = start[_LENGTH_BYTES:][: len(_HEAD)].decode(errors="replace")
        raise DataError(f"{path} is no checkpoint of Echelon's: expected {_HEAD.decode()!r} at byte 8, got {begins!r}")
    needed = _LENGTH_BYTES + int.from_bytes(start[:_LENGTH_BYTES], "little")
    if size < max(needed, len(start), _LENGTH_BYTES + len(_HEAD) + len(_BLANK)):
        _bad(path, f"it is cut off at {size} bytes, and its header alone has {needed}")
    whole = start + stream.read(max(0, needed - len(start)))
    seal, found = start[-len(_BLANK) :].decode(errors="replace"), _digest(_with_seal(whole, _BLANK))
    if seal != found:
        _bad(path, f"the digest of its header is {found}, but the header itself has {seal}")
    header = _decode(whole[_LENGTH_BYTES:], path)
    total = needed + max((entry.data_offsets[1] for entry in header.entries.values()), default=0)
    if size < total:
        _bad(path, f"it is cut off at {size} of {total} bytes")
    if size > total:
        _bad(path, f"it has {size} bytes, and its header speaks of {total}")
    return header


def _decode(text: bytes, path: Path) -> _Header:
    """The header's parts, in the order of the tensors."""
    try:
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(raw.pop("__metadata__"), type=_Metadata)
        entries = {name: msgspec.json.decode(one, type=_Entry) for name, one in raw.items()}
        digests = msgspec.json.decode(metadata.digests, type=dict[str, str])
        facts = msgspec.json.decode(metadata.echelon, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        _bad(path, f"its header cannot be read: {error}")
    _check_entries(entries, digests, path)
    return _Header(entries, digests, facts)


def _check_entries(entries: dict[str, _Entry], digests: dict[str, str], path: Path) -> None:
    """The digest has excluded accidents; this is for headers that somebody made."""
    end = 0
    for name, entry in entries.items():
        begin = end
        end += prod(entry.shape) * _BY_NAME[entry.dtype].itemsize if entry.dtype in _BY_NAME else 0
        known = entry.dtype in _BY_NAME and name.partition("/")[0] in _GROUPS and name in digests
        if not known or min(entry.shape, default=0) < 0 or entry.data_offsets != (begin, end):
            _bad(path, f"its header has no sound entry for tensor {name!r}: {entry}")


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the processor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _digest(data: bytes | memoryview) -> str:
    return blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


def _bad(path: Path, what: str) -> NoReturn:
    raise DataError(f"the checkpoint {path} is damaged: {what}; use an earlier one")
