"""Carrying out updates and answers: sum gradients, step the optimizer, hand weights out, a cache full at a time.

A step touches gradients of every worker, the weights, the optimizer's state and every worker's copy of the weights.
Doing all of it for one chunk that fits the cache before going to the next means each byte crosses the memory bus
once; doing it array by array costs about twice the time for a model that exceeds the cache.

Neighbouring keys that are treated alike form one *run*, so the cost does not grow with the number of keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.cluster.placement import Layout, Piece, Segment, Slot
from echelon.server.kernels import Kernel
from echelon.server.memory import Window, master_dtype, zeros

CHUNK = 131_072  # elements: half a megabyte an array; smaller spends its time in calls, larger leaves the cache


class Part(NamedTuple):
    """A worker's gradient and its weight in the sum."""

    window: Window
    weight: float


class Update(NamedTuple):
    """How a key is to be updated. `kernel` None: the sum replaces the weights. Equal updates can share a run."""

    parts: tuple[Part, ...]
    kernel: Kernel | None
    step: int
    lr: float
    gamma: int


class Task(NamedTuple):
    """One key's update (if any) and the windows its new weights go to."""

    key: int
    update: Update | None
    outputs: tuple[Window, ...]


class Store:
    """A server's packed weights and optimizer state."""

    def __init__(self, layout: Layout, rank: int) -> None:
        self._layout = layout
        self._rank = rank
        self._weights: dict[int, Tensor] = {}
        self._states: dict[int, list[Tensor]] = {}
        self._scratch: dict[torch.dtype, Tensor] = {}

    def weights(self, piece: Piece) -> Tensor:
        """The stored elements of a piece."""
        stored = self._weights.get(piece.segment)
        if stored is None:
            segment = self._layout.segments[piece.segment]
            stored = self._weights[piece.segment] = zeros(self._size(segment), master_dtype(segment.dtype))
        return stored[piece.local : piece.local + piece.stop - piece.start]

    def states(self, piece: Piece, kernel: Kernel) -> list[Tensor]:
        """The optimizer's state of a piece, made when first asked for."""
        fills = kernel.state_fills()
        states = self._states.setdefault(piece.segment, [])
        segment = self._layout.segments[piece.segment]
        while len(states) < len(fills):
            state = zeros(self._size(segment), master_dtype(segment.dtype))
            if fill := fills[len(states)]:
                state.fill_(fill)
            states.append(state)
        stop = piece.local + piece.stop - piece.start
        return [state[piece.local : stop] for state in states[: len(fills)]]

    def run(self, tasks: Sequence[Task]) -> None:
        """Carry tasks out, in order, neighbours together."""
        start = 0
        for index in range(1, len(tasks) + 1):
            if index == len(tasks) or tasks[index][1:] != tasks[start][1:]:
                self._run_alike(tasks[start:index])
                start = index

    def _run_alike(self, tasks: Sequence[Task]) -> None:
        _, update, outputs = tasks[0]
        slots = [self._layout.slots[task.key] for task in tasks]
        exact = update is not None and update.kernel is not None and update.kernel.exact
        windows = [part.window for part in update.parts] if update else []
        for piece in self._runs(slots, [*windows, *outputs], exact):
            if update is None:
                self._copy(piece, outputs)
            else:
                self._update(piece, update, outputs)

    def _runs(self, slots: Sequence[Slot], windows: Sequence[Window], exact: bool) -> list[Piece]:
        """The pieces of some keys, joined where memory is contiguous in every window. Exact pieces stay apart."""
        runs: list[Piece] = []
        for slot in slots:
            for piece in self._layout.pieces(slot, self._rank, exact=exact):
                last = runs[-1] if runs and not exact else None
                if (
                    last
                    and last.stop == piece.start
                    and last.segment == piece.segment
                    and last.local + last.stop - last.start == piece.local
                    and not any(window.seam(piece.segment, piece.start) for window in windows)
                ):
                    runs[-1] = Piece(piece.segment, last.start, piece.stop, last.local)
                else:
                    runs.append(piece)
        return runs

    def _update(self, piece: Piece, update: Update, outputs: Sequence[Window]) -> None:
        weights = self.weights(piece)
        kernel = update.kernel
        states = self.states(piece, kernel) if kernel else []
        chunks = zip(
            torch.split(weights, CHUNK),
            _together([part.window.view(*piece[:3]) for part in update.parts]),
            _together(states),
            _together([output.view(*piece[:3]) for output in outputs]),
            strict=False,
        )
        shares = [part.weight for part in update.parts]
        for weight, gradients, state, copies in chunks:
            total = self._sum(gradients, shares, weight.dtype)
            if kernel is None:
                weight.copy_(total)
            else:
                kernel.update(weight, total, state, update.step, update.lr, update.gamma)
            for copy in copies:
                copy.copy_(weight)

    def _sum(self, gradients: Sequence[Tensor], shares: Sequence[float], dtype: torch.dtype) -> Tensor:
        """The weighted sum in rank order. One gradient of weight 1 is used where it lies."""
        first = gradients[0]
        if len(gradients) == 1 and shares[0] == 1 and first.dtype == dtype:
            return first
        total = self._room(first.shape[0], dtype)
        if shares.count(shares[0]) == len(shares):
            if len(gradients) > 1 and first.dtype == dtype:
                torch.add(first, gradients[1], out=total)
                rest = gradients[2:]
            else:
                total.copy_(first)
                rest = gradients[1:]
            for gradient in rest:
                total.add_(gradient)
            return total if shares[0] == 1 else total.mul_(shares[0])
        total.copy_(first).mul_(shares[0])
        for gradient, share in zip(gradients[1:], shares[1:], strict=True):
            total.add_(gradient, alpha=share)
        return total

    def _copy(self, piece: Piece, outputs: Sequence[Window]) -> None:
        for chunk in range(piece.start, piece.stop, CHUNK):
            stop = min(piece.stop, chunk + CHUNK)
            weights = self.weights(Piece(piece.segment, chunk, stop, piece.local + chunk - piece.start))
            for output in outputs:
                output.view(piece.segment, chunk, stop).copy_(weights)

    def _room(self, length: int, dtype: torch.dtype) -> Tensor:
        room = self._scratch.get(dtype)
        if room is None:
            room = self._scratch[dtype] = torch.empty(CHUNK, dtype=dtype)
        return room[:length]

    def _size(self, segment: Segment) -> int:
        return self._layout.stored(segment, self._rank)


def _together(arrays: Sequence[Tensor]) -> Iterable[tuple[Tensor, ...]]:
    """Chunk by chunk, all arrays at once; for no arrays, for ever nothing."""
    return zip(*(torch.split(array, CHUNK) for array in arrays), strict=True) if arrays else itertools.repeat(())
