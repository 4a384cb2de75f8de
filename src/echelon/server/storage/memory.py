"""Tensors over raw memory: what a server stores, and what it reads and writes of a worker.

A `Window` returns elements [start, stop) of a segment as a tensor, wherever they are: in a worker's shared memory
(`Mapped`), in frames that were received or will be sent (`Framed`), or as factors (`factored.py`). The code that sums
and updates does not distinguish them. `RequestTensors` finds the window of a request, and checks it against the layout
before anything is read or written.
"""

from __future__ import annotations

import bisect
import mmap
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from echelon.cluster.messages import Push
from echelon.cluster.placement import ITEM_BYTES, Layout, Piece, Segment, join
from echelon.errors import UsageError
from echelon.server.storage.factored import Factored, factors_length
from echelon.server.storage.keys_cache import KeysCache
from echelon.server.storage.write_log import WriteLog

FRAME_ELEMENTS = 1 << 20
_HUGE = 1 << 25
TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
_MASTERS = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def master_dtype(name: str) -> torch.dtype:
    """Return the dtype that a server uses for a key: half precision is stored, summed and updated in float32."""
    dtype = TORCH_DTYPES[name]
    return _MASTERS.get(dtype, dtype)


def zeros(length: int, dtype: torch.dtype) -> Tensor:
    """Return zeroed memory. Its pages are allocated when they are first used."""
    size = max(1, length) * dtype.itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE:
        memory.madvise(mmap.MADV_HUGEPAGE)  # saves a fifth of the time of SGD over 51 MB
    return torch.frombuffer(memory, dtype=dtype)[:length]


def as_tensor(buffer: memoryview | bytearray, dtype: str) -> Tensor:
    """Return a flat tensor over the bytes of a buffer, without a copy."""
    return torch.frombuffer(buffer, dtype=TORCH_DTYPES[dtype])


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a flat tensor, without a copy."""
    return tensor.view(torch.uint8).numpy().data


def attached_tensor(buffer: memoryview, segment: Segment) -> Tensor:
    """Return a segment in a worker's memory. Raise UsageError if the memory is smaller."""
    if len(buffer) < segment.capacity * ITEM_BYTES[segment.dtype]:
        raise UsageError(
            f"the attached memory has {len(buffer)} bytes, but segment {segment.index} has {segment.capacity} elements "
            f"of {segment.dtype}"
        )
    return torch.frombuffer(buffer, dtype=TORCH_DTYPES[segment.dtype], count=segment.capacity)


def frame_pieces(pieces: Sequence[Piece]) -> list[Piece]:
    """Return the frames in which pieces travel: neighbours joined and cut to a few megabytes. Both ends compute them.

    Cuts are at multiples of FRAME_ELEMENTS, which every stripe divides. A piece is in one stripe, so in one frame.
    """
    frames = []
    for piece in join(pieces):
        start = piece.start
        while start < piece.stop:
            stop = min(piece.stop, (start // FRAME_ELEMENTS + 1) * FRAME_ELEMENTS)
            frames.append(Piece(piece.segment, start, stop, piece.local + start - piece.start))
            start = stop
    return frames


class Window(Protocol):
    """Access to the elements of segments."""

    def view(self, segment: int, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) as a tensor. The range must not cross a seam."""
        ...

    def seams(self, segment: int, start: int, stop: int) -> Sequence[int]:
        """Return the positions between start and stop at which the memory is not contiguous."""
        ...


class Mapped:
    """A worker's shared memory: one tensor per attached segment, and where a server notes what it writes to them."""

    def __init__(self) -> None:
        self.segments: dict[int, Tensor] = {}
        self.log: WriteLog | None = None

    def view(self, segment: int, start: int, stop: int) -> Tensor:
        return self.segments[segment][start:stop]

    def seams(self, segment: int, start: int, stop: int) -> Sequence[int]:
        return ()


NOWHERE = Mapped()  # where a backup writes the weights of answers, which only the primary sends


class Framed:
    """Frames, one for each piece of `frame_pieces`."""

    def __init__(self, pieces: Sequence[Piece], frames: Sequence[Tensor]) -> None:
        self._frames = frames
        self._pieces = list(pieces)
        starts = [(piece.segment, piece.start) for piece in pieces]
        self._order = sorted(range(len(pieces)), key=starts.__getitem__)
        self._sorted = [starts[index] for index in self._order]

    def view(self, segment: int, start: int, stop: int) -> Tensor:
        index = self._order[bisect.bisect_right(self._sorted, (segment, start)) - 1]
        offset = start - self._pieces[index].start
        return self._frames[index][offset : offset + stop - start]

    def seams(self, segment: int, start: int, stop: int) -> Sequence[int]:
        low = bisect.bisect_right(self._sorted, (segment, start))
        high = bisect.bisect_left(self._sorted, (segment, stop))
        return [at for _, at in self._sorted[low:high]]

    @property
    def num_bytes(self) -> int:
        """The bytes of all frames."""
        return sum(frame.nbytes for frame in self._frames)

    def buffers(self) -> list[memoryview]:
        """Return the frames as bytes, to send."""
        return [as_bytes(frame) for frame in self._frames]


def empty_frames(pieces: Sequence[Piece], dtypes: Sequence[str]) -> Framed:
    """Allocate the frames of an answer, one per piece."""
    return Framed(
        pieces, [torch.empty(piece.stop - piece.start, dtype=TORCH_DTYPES[dtypes[piece.segment]]) for piece in pieces]
    )


def received(frame: memoryview, dtype: str) -> Tensor:
    """Return a received frame as a tensor, without a copy if its memory is writable."""
    return as_tensor(bytearray(frame) if frame.readonly else frame, dtype)  # torch needs writable memory even to read


class RequestTensors:
    """Finds the windows of requests to one server: in the worker's shared memory or in frames."""

    def __init__(self, layout: Layout, rank: int) -> None:
        self._layout = layout
        self._rank = rank
        self._pieces: KeysCache[list[Piece]] = KeysCache()  # of keys, as frames

    def pushed(self, mapped: Mapped, request: Push, frames: Sequence[memoryview]) -> Window:
        """Return the gradients of a push, or the gradient that its factors describe."""
        rank = request.header.factor_rank
        if not rank:
            return self.incoming(mapped, request.keys, frames, request.framed)
        if len(request.keys) > 1:
            raise UsageError(f"a push of factors must name one key; this one names {len(request.keys)}")
        slot = self._layout.slots[request.keys[0]]
        length = factors_length(slot, rank)
        if not request.framed:
            self._check_attached(mapped, request.keys)
            return Factored(slot, rank, mapped.view(slot.segment, slot.start, slot.start + length))
        _check_lengths([length * ITEM_BYTES[slot.spec.dtype]], frames)
        return Factored(slot, rank, received(frames[0], slot.spec.dtype))

    def pushed_frames(self, mapped: Mapped, request: Push) -> list[memoryview]:
        """Return what a push has in a worker's shared memory, as frames."""
        rank = request.header.factor_rank
        if not rank:
            return self.frames(mapped, request.keys)
        slot = self._layout.slots[request.keys[0]]
        return [as_bytes(mapped.view(slot.segment, slot.start, slot.start + factors_length(slot, rank)))]

    def frames(self, mapped: Mapped, keys: Sequence[int]) -> list[memoryview]:
        """Return the part of some keys that this server stores of a worker's shared memory, as frames."""
        return [as_bytes(mapped.view(*piece[:3])) for piece in self.frame_pieces(keys)]

    def incoming(self, mapped: Mapped, keys: Sequence[int], frames: Sequence[memoryview], framed: bool) -> Window:
        """Return the tensors that a request carries."""
        if not framed:
            self._check_attached(mapped, keys)
            return mapped
        pieces, dtypes = self.frame_pieces(keys), self._dtypes()
        expected = [(piece.stop - piece.start) * ITEM_BYTES[dtypes[piece.segment]] for piece in pieces]
        _check_lengths(expected, frames)
        return Framed(pieces, [received(frame, dtypes[p.segment]) for p, frame in zip(pieces, frames, strict=True)])

    def outgoing(self, mapped: Mapped, keys: Sequence[int], framed: bool) -> Window:
        """Return where the weights of an answer go."""
        if framed:
            return empty_frames(self.frame_pieces(keys), self._dtypes())
        self._check_attached(mapped, keys)
        return mapped

    def _check_attached(self, mapped: Mapped, keys: Sequence[int]) -> None:
        if len(mapped.segments) == len(self._layout.segments):
            return
        for slot in (self._layout.slots[key] for key in keys):
            if slot.segment not in mapped.segments:
                raise UsageError(f"this worker's memory for key {slot.spec.name!r} is not attached; send frames")

    def frame_pieces(self, keys: Sequence[int]) -> list[Piece]:
        """Return the frames in which the parts of some keys on this server travel. Cached: requests repeat."""
        names = tuple(keys)
        pieces = self._pieces.get(names)
        if pieces is None:
            slots = self._layout.slots
            pieces = frame_pieces([piece for key in keys for piece in self._layout.pieces(slots[key], self._rank)])
            self._pieces.put(names, pieces)
        return pieces

    def forget(self) -> None:
        """Forget what was computed of keys, because some were removed."""
        self._pieces.clear()

    def _dtypes(self) -> list[str]:
        return [segment.dtype for segment in self._layout.segments]


def _check_lengths(expected: Sequence[int], frames: Sequence[memoryview]) -> None:
    received_bytes = [len(frame) for frame in frames]
    if list(expected) != received_bytes:
        raise UsageError(
            f"the request has {len(received_bytes)} frames of {sum(received_bytes)} bytes; expected "
            f"{len(expected)} frames of {sum(expected)} bytes"
        )
