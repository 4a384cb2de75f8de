"""The contents of an image record: a 24-byte header with label and id, then the encoded image.

    flag u32 | label f32 | id u64 | id2 u64 | flag x label f32 | image bytes

A single label is in the header, with flag 0. A list of labels follows the header; then flag is their number, and the
label in the header is 0.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from echelon.data.records.frame import Bytes
from echelon.errors import DataError, UsageError

Labels: TypeAlias = NDArray[np.float32]

HEADER_BYTES = 24
_HEADER = struct.Struct("<IfQQ")
_U64_MAX = 2**64 - 1
_SIGNATURES = ((b"\xff\xd8\xff", ".jpg"), (b"\x89PNG\r\n\x1a\n", ".png"), (b"GIF8", ".gif"), (b"BM", ".bmp"))


class Header(NamedTuple):
    """The label (a number, or several) and the ids of one image. Labels are stored as float32."""

    label: float | Sequence[float] | NDArray[Any]
    id: int = 0
    id2: int = 0

    @property
    def labels(self) -> Labels:
        """All labels as an array, one or more."""
        return np.atleast_1d(np.asarray(self.label, np.float32))


def pack(header: Header, payload: Bytes) -> bytes:
    """Return header and image as the payload of one record."""
    if not (0 <= header.id <= _U64_MAX and 0 <= header.id2 <= _U64_MAX):
        raise UsageError(f"ids must be in 0 ... 2^64-1, got id {header.id}, id2 {header.id2}")
    label = header.label
    if isinstance(label, (int, float)) or np.ndim(label) == 0:
        return _HEADER.pack(0, float(label), header.id, header.id2) + payload  # type: ignore[arg-type]
    labels = np.asarray(label, "<f4")
    if labels.ndim != 1 or not labels.size:
        raise UsageError(f"labels must be a number or a flat list of at least one, got shape {labels.shape}")
    return b"".join((_HEADER.pack(labels.size, 0.0, header.id, header.id2), labels.tobytes(), payload))


def unpack(record: Bytes) -> tuple[Header, memoryview]:
    """Return the header and the image bytes of a record, without copying them."""
    view = memoryview(record)
    if len(view) < HEADER_BYTES:
        raise DataError(f"a record of {len(view)} bytes is not an image record: the header alone has {HEADER_BYTES}")
    num_labels, label, key, key2 = _HEADER.unpack_from(view)
    if not num_labels:
        return Header(label, key, key2), view[HEADER_BYTES:]
    start = HEADER_BYTES + 4 * num_labels
    if len(view) < start:
        raise DataError(
            f"an image record with {num_labels} labels has at least {start} bytes, but this one has {len(view)}"
        )
    labels = np.frombuffer(view, "<f4", num_labels, HEADER_BYTES).astype(np.float32)  # A copy, which outlives the file.
    return Header(labels, key, key2), view[start:]


def image_suffix(payload: Bytes) -> str:
    """Return the suffix for an image's first bytes: .jpg, .png, .webp, .gif, .bmp, or .bin for anything else."""
    start = bytes(payload[:12])
    if start[:4] == b"RIFF" and start[8:] == b"WEBP":
        return ".webp"
    return next((suffix for signature, suffix in _SIGNATURES if start.startswith(signature)), ".bin")
