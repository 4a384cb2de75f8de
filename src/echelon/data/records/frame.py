"""The RecordIO container format as pure functions of bytes: encode and decode a record, and scan for record heads.

A file is a sequence of parts, each 4-byte aligned and little endian:

    magic u32 | lrec u32 | data | zero padding to a multiple of 4
    lrec = kind << 29 | number of data bytes

A record is one WHOLE part, or FIRST, MIDDLE ..., LAST. The writer splits a payload at every aligned magic word and
omits that word; the reader inserts it again between the parts. So an aligned magic word in a file is always the head of
a part, which makes it possible to resynchronise after damage and to shard by bytes.

A fault is a FrameError with offsets into the buffer; the caller adds the file name.
"""

from __future__ import annotations

import struct
from typing import TypeAlias

import numpy as np

from echelon.errors import UsageError

Bytes: TypeAlias = bytes | bytearray | memoryview

MAGIC = 0xCED7230A
MAGIC_BYTES = struct.pack("<I", MAGIC)
LENGTH_BITS = 29
MAX_RECORD_BYTES = (1 << LENGTH_BITS) - 1
HEAD_BYTES = 8
WHOLE, FIRST, MIDDLE, LAST = range(4)

_HEAD = struct.Struct("<II")
_SEARCH_BYTES = 1 << 22


class FrameError(Exception):
    """The bytes at `offset` are not a valid record; `part_offset` is the part that is wrong."""

    def __init__(self, offset: int, part_offset: int, reason: str) -> None:
        super().__init__(reason)
        self.offset = offset
        self.part_offset = part_offset
        self.reason = reason


def encode(payload: Bytes) -> bytes:
    """Return the bytes of one record in a file."""
    data = bytes(payload)
    if len(data) > MAX_RECORD_BYTES:
        raise UsageError(f"a record of {len(data)} bytes is too long: the format allows {MAX_RECORD_BYTES}; split it")
    cuts = _aligned_magic_words(data)
    if not cuts:
        return b"".join((_HEAD.pack(MAGIC, len(data)), data, bytes(-len(data) % 4)))
    starts = [0, *(cut + 4 for cut in cuts)]
    kinds = [FIRST, *[MIDDLE] * (len(cuts) - 1), LAST]
    pieces: list[bytes] = []
    for kind, start, end in zip(kinds, starts, [*cuts, len(data)], strict=True):
        pieces += (_HEAD.pack(MAGIC, kind << LENGTH_BITS | end - start), data[start:end])
    pieces.append(bytes(-len(data) % 4))  # Only the last piece can end unaligned.
    return b"".join(pieces)


def _aligned_magic_words(data: bytes) -> list[int]:
    cuts = []
    at = data.find(MAGIC_BYTES)
    while at >= 0:
        if at % 4 == 0:
            cuts.append(at)
        at = data.find(MAGIC_BYTES, at + 4 if at % 4 == 0 else at + 1)
    return cuts


def decode(data: memoryview, offset: int) -> tuple[memoryview, int]:
    """Return the payload of the record at `offset`, and the offset after it. A WHOLE part is not copied."""
    kind, start, end, after = _part(data, offset, offset)
    if kind == WHOLE:
        return data[start:end], after
    if kind != FIRST:
        raise FrameError(offset, offset, f"{_describe(kind)}, but a record must begin here")
    pieces: list[Bytes] = [data[start:end]]
    while kind != LAST:
        part_offset = after
        kind, start, end, after = _part(data, offset, part_offset)
        if kind not in (MIDDLE, LAST):
            raise FrameError(offset, part_offset, f"{_describe(kind)}, but the record's last part is missing")
        pieces += (MAGIC_BYTES, data[start:end])
    return memoryview(b"".join(pieces)), after


def _part(data: memoryview, offset: int, part_offset: int) -> tuple[int, int, int, int]:
    """Return (kind, data start, data end, next part) of the part at `part_offset` of the record at `offset`."""
    left = len(data) - part_offset
    if left < HEAD_BYTES:
        raise FrameError(offset, part_offset, f"the file ends after {max(left, 0)} of the {HEAD_BYTES} head bytes")
    magic, lrec = _HEAD.unpack_from(data, part_offset)
    if magic != MAGIC:
        found = bytes(data[part_offset : part_offset + 4]).hex(" ")
        raise FrameError(offset, part_offset, f"expected the magic word {MAGIC_BYTES.hex(' ')}, found {found}")
    length = lrec & MAX_RECORD_BYTES
    start = part_offset + HEAD_BYTES
    after = start + (length + 3 & ~3)
    if after > len(data):
        reason = f"the head states {after - start} bytes, but the file has only {len(data) - start} more"
        raise FrameError(offset, part_offset, reason)
    return lrec >> LENGTH_BITS, start, start + length, after


def _describe(kind: int) -> str:
    names = {WHOLE: "a whole record", FIRST: "a first part", MIDDLE: "a middle part", LAST: "a last part"}
    return f"{names.get(kind, 'a part of unknown kind')} (flag {kind}) begins here"


def scan(data: memoryview) -> tuple[list[int], FrameError | None]:
    """Return the offsets of all records up to the first fault, and that fault; reads only heads."""
    offsets: list[int] = []
    append, unpack, size = offsets.append, _HEAD.unpack_from, len(data)
    at = 0
    try:
        while at < size:
            after = size + 1
            if at + HEAD_BYTES <= size:
                magic, lrec = unpack(data, at)
                if magic == MAGIC and lrec <= MAX_RECORD_BYTES:
                    after = at + HEAD_BYTES + (lrec + 3 & ~3)
            if after > size:  # Split or broken: decode() tells which.
                after = decode(data, at)[1]
            append(at)
            at = after
    except FrameError as error:
        return offsets, error
    return offsets, None


def next_head(data: memoryview, start: int, end: int | None = None) -> int | None:
    """Return the first offset in start ... end where a record may begin: an aligned magic of a whole or first part."""
    limit = len(data) if end is None else min(end, len(data))
    at = start + 3 & ~3
    while at < limit:
        stop = min(limit, at + _SEARCH_BYTES)
        words = np.frombuffer(data[at : at + (stop - at & ~3)], "<u4")
        for word in np.flatnonzero(words == MAGIC).tolist():
            head = at + 4 * word
            if head + HEAD_BYTES <= len(data) and _HEAD.unpack_from(data, head)[1] >> LENGTH_BITS in (WHOLE, FIRST):
                return head
        at += _SEARCH_BYTES
    return None


def check_no_head_inside(data: memoryview, offset: int, after: int) -> None:
    """Raise FrameError if the record at `offset` contains another record's head, because its length is wrong then."""
    head = next_head(data, offset + HEAD_BYTES, after)
    if head is not None:
        raise FrameError(offset, offset, f"its length extends over the record head at byte {head}")
