"""Messages in a byte stream: each is preceded by its length."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from echelon.cluster.messages import Malformed

MAX_FRAME = 16 << 20
_LENGTH = struct.Struct("!I")
_SHOWN_BYTES = 80  # of a stream of something else, in an error
M = TypeVar("M")


def with_length(body: bytes) -> bytes:
    """Return the bytes of a message, preceded by their length."""
    return _LENGTH.pack(len(body)) + body


class FrameReader(Generic[M]):
    """Splits a byte stream, which may arrive in any chunks, into messages. It keeps at most one incomplete message."""

    def __init__(self, decode: Callable[[bytes], M], max_frame: int = MAX_FRAME) -> None:
        self._decode = decode
        self._max_frame = max_frame
        self._buffer = bytearray()
        self.num_bytes = 0  # of the last message

    def feed(self, data: bytes | memoryview) -> Iterator[M]:
        """Add bytes and yield the messages that are complete now. Raises Malformed at the first invalid one."""
        self.add(data)
        while (message := self.next()) is not None:
            yield message

    def add(self, data: bytes | memoryview) -> None:
        """Add bytes."""
        self._buffer += data

    def next(self) -> M | None:
        """Return the next message, or None if it is not complete. Raises Malformed if it is invalid."""
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > self._max_frame:
            start = bytes(self._buffer[:_SHOWN_BYTES]).decode(errors="replace")
            raise Malformed(
                f"these bytes are not a message: {start!r} would begin one of {length} bytes, and at most "
                f"{self._max_frame} are allowed"
            )
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        self.num_bytes = end
        return self._decode(body)
