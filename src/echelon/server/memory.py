"""Tensors over raw memory: what a server stores, and what it reads and writes of a worker.

A `Window` returns elements [start, stop) of a segment as a tensor, wherever they are: in a worker's shared memory
(`Mapped`), or in frames that were received or will be sent (`Framed`). The code that sums and updates does not
distinguish them.
"""

from __future__ import annotations

import bisect
import mmap
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from echelon.cluster.placement import ITEM_BYTES, Piece, join

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
    """A worker's shared memory: one tensor per attached segment."""

    def __init__(self) -> None:
        self.segments: dict[int, Tensor] = {}

    def view(self, segment: int, start: int, stop: int) -> Tensor:
        return self.segments[segment][start:stop]

    def seams(self, segment: int, start: int, stop: int) -> Sequence[int]:
        return ()


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

    def buffers(self) -> list[memoryview]:
        """Return the frames as bytes, to send."""
        return [frame.view(torch.uint8).numpy().data for frame in self._frames]


def empty_frames(pieces: Sequence[Piece], dtypes: Sequence[str]) -> Framed:
    """Allocate the frames of an answer, one per piece."""
    return Framed(
        pieces, [torch.empty(piece.stop - piece.start, dtype=TORCH_DTYPES[dtypes[piece.segment]]) for piece in pieces]
    )


def received(frame: memoryview, dtype: str) -> Tensor:
    """Return a received frame as a tensor, without a copy if its memory is writable."""
    return as_tensor(bytearray(frame) if frame.readonly else frame, dtype)  # torch needs writable memory even to read


def received_frames(pieces: Sequence[Piece], frames: Sequence[memoryview], dtypes: Sequence[str]) -> Framed:
    """Return received frames as a window. The caller has checked their lengths."""
    return Framed(pieces, [received(frame, dtypes[p.segment]) for p, frame in zip(pieces, frames, strict=True)])
