"""What a server writes to a worker's memory, noted in that memory, in case the server dies before it has answered.

A server writes new weights to the memory that a worker shares with it, and then answers. If it is killed in between,
the worker has weights that it was not told about. If it is killed while it writes, a part of the weights is new.
Therefore it notes before it writes which updates the weights will contain, and afterwards that they do. A worker reads
these notes when it gives its weights to a new server (decision 38).

A kill does not lose what a process has stored in shared memory, so the order in which the program stores is enough.

The memory has two halves. A note is appended to the present half; if there is no room, the other half is emptied and
becomes the present one. So the latest notes are kept, of at least half of the memory.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec

from echelon.cluster.messages import Contents
from echelon.errors import UsageError

LOG_BYTES = 128 << 10
_HEAD = struct.Struct("=QQQ")  # the present half, and the bytes of each half that are used
_NOTE = struct.Struct("=II")  # the length of the text after it, and whether the weights are written
_HALF = (LOG_BYTES - _HEAD.size) // 2


class Written(msgspec.Struct, frozen=True, array_like=True):
    """The weights that answer a request, or some of them. Contents without keys are of all keys of the request."""

    request: int
    contents: list[Contents]


class Note(msgspec.Struct, frozen=True):
    """Weights that a server has begun to write, and whether it has ended."""

    written: list[Written]
    is_complete: bool


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(list[Written])


def attached_log(memory: memoryview) -> WriteLog:
    """Return the notes in attached memory. Raise UsageError if it is too small."""
    if len(memory) < LOG_BYTES:
        raise UsageError(f"the attached memory for notes has {len(memory)} bytes; {LOG_BYTES} are needed")
    return WriteLog(memory)


class WriteLog:
    """The notes in the memory of one worker, of the one server that writes them. A new server continues them.

    A worker can write anything to its memory, so the server reads it only once, and checks what it reads.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory[:LOG_BYTES]
        self._last: int | None = None  # where the note is whose weights are being written, and its length
        self._length = 0
        self._present, *self._used = _HEAD.unpack_from(self._memory)
        if self._present > 1 or max(self._used) > _HALF:
            self.clear()

    def begin(self, written: Sequence[Written]) -> None:
        """Note what will be written.

        A note that is longer than a half is left out: thousands of keys would have to differ in what they contain.
        """
        text = _ENCODER.encode(written)
        size = _NOTE.size + len(text)
        if size > _HALF:
            self._last = None
            return
        if self._used[self._present] + size > _HALF:
            self._present = 1 - self._present
            self._used[self._present] = 0
            self._write_head()
        self._last, self._length = self._start(self._present) + self._used[self._present], len(text)
        _NOTE.pack_into(self._memory, self._last, self._length, 0)
        begin = self._last + _NOTE.size
        self._memory[begin : begin + len(text)] = text
        self._used[self._present] += size
        self._write_head()  # from here on the note counts

    def end(self) -> None:
        """Note that the weights are written."""
        if self._last is not None:
            _NOTE.pack_into(self._memory, self._last, self._length, 1)

    def notes(self) -> list[Note]:
        """Return the notes, the oldest first."""
        found = []
        for half in (1 - self._present, self._present):
            at = self._start(half)
            stop = at + self._used[half]
            while at < stop:
                length, is_complete = _NOTE.unpack_from(self._memory, at)
                at += _NOTE.size + length
                found.append(Note(_DECODER.decode(self._memory[at - length : at]), bool(is_complete)))
        return found

    def clear(self) -> None:
        """Forget all notes."""
        self._present, self._used = 0, [0, 0]
        self._write_head()

    def _start(self, half: int) -> int:
        return _HEAD.size + half * _HALF

    def _write_head(self) -> None:
        _HEAD.pack_into(self._memory, 0, self._present, *self._used)
