"""Carrying out updates and answers: sum gradients, step the optimizer, hand weights out, a cache full at a time.

A step touches gradients of every worker, the weights, the optimizer's state and every worker's copy of the weights.
Doing all of it for one chunk that fits the cache before going to the next means each byte crosses the memory bus
once, instead of once for every array operation.

Neighbouring keys that are treated alike form one *run*, so the cost does not grow with the number of keys.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.cluster.placement import Layout, Piece, Segment, join
from echelon.server.factored import Factored, sums
from echelon.server.kernels import Kernel
from echelon.server.memory import Window, master_dtype, zeros

_REMEMBERED = 4096
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
    """Some keys' update (if any) and the windows their new weights go to."""

    keys: tuple[int, ...]
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
        self._joined: dict[tuple[int, ...], list[Piece]] = {}

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
        keys = tasks[0].keys if len(tasks) == 1 else tuple(itertools.chain.from_iterable(task.keys for task in tasks))
        if update is not None and update.kernel is not None and update.kernel.whole:
            for key in keys:
                self._update_whole(key, update, update.kernel, outputs)
            return
        exact = update is not None and update.kernel is not None and update.kernel.exact
        pieces = self._exact_pieces(keys) if exact else self._joined_pieces(keys)
        windows = [*(part.window for part in update.parts), *outputs] if update else outputs
        for piece in itertools.chain.from_iterable(_without_seams(piece, windows) for piece in pieces):
            if update is None:
                self._copy(piece, outputs)
            else:
                self._update(piece, update, outputs)

    def _joined_pieces(self, keys: tuple[int, ...]) -> list[Piece]:
        """The keys' parts here with their padding, neighbours joined: few and long. Remembered, they recur."""
        joined = self._joined.get(keys)
        if joined is None:
            slots = [self._layout.slots[key] for key in keys]
            joined = join(itertools.chain.from_iterable(self._layout.pieces(slot, self._rank) for slot in slots))
            if len(self._joined) >= _REMEMBERED:
                self._joined.clear()
            self._joined[keys] = joined
        return joined

    def _exact_pieces(self, keys: tuple[int, ...]) -> list[Piece]:
        slots = [self._layout.slots[key] for key in keys]
        parts = (self._layout.pieces(slot, self._rank, exact=True) for slot in slots)
        return list(itertools.chain.from_iterable(parts))

    def _update(self, piece: Piece, update: Update, outputs: Sequence[Window]) -> None:
        weights = self.weights(piece)
        kernel = update.kernel
        states = self.states(piece, kernel) if kernel else []
        chunks = zip(
            _split(weights),
            self._totals(update.parts, piece, weights.dtype),
            _together(states),
            _together([output.view(*piece[:3]) for output in outputs]),
            strict=False,
        )
        for weight, (total, scale), state, copies in chunks:
            if scale != 1 and not (kernel and kernel.scales_gradient):
                total, scale = total.mul_(scale), 1.0
            if kernel is None:
                weight.copy_(total)
            else:
                kernel.update(weight, total, state, update.step, update.lr, update.gamma, scale)
            for copy in copies:
                _copy_into(copy, weight)

    def _update_whole(self, key: int, update: Update, kernel: Kernel, outputs: Sequence[Window]) -> None:
        """A key that lies all here: its gradient put together, one call of the kernel, its weights handed out."""
        windows = [*(part.window for part in update.parts), *outputs]
        for whole in join(self._exact_pieces((key,))):
            weights = self.weights(whole)
            gradient = torch.empty_like(weights)
            pieces = list(_without_seams(whole, windows))
            for piece in pieces:
                self._sum_into(gradient[piece.start - whole.start : piece.stop - whole.start], piece, update.parts)
            kernel.update(weights, gradient, self.states(whole, kernel), update.step, update.lr, update.gamma, 1.0)
            for piece in pieces:
                self._copy(piece, outputs)

    def _sum_into(self, gradient: Tensor, piece: Piece, parts: Sequence[Part]) -> None:
        totals = self._totals(parts, piece, gradient.dtype)
        for target, (total, scale) in zip(_split(gradient), totals, strict=True):
            torch.mul(total, scale, out=target)

    def _totals(self, parts: Sequence[Part], piece: Piece, dtype: torch.dtype) -> Iterator[tuple[Tensor, float]]:
        """The weighted sum of the parts over a piece, chunk by chunk, and a scale still to be applied."""
        shares = [part.weight for part in parts]
        factored = [part.window for part in parts if isinstance(part.window, Factored)]
        if len(factored) == len(parts) and len(set(shares)) == 1:
            for block in sums(factored, piece):
                for total in _split(block):
                    yield total, shares[0]
        else:
            for gradients in zip(*(_chunks(part.window, piece) for part in parts), strict=True):
                yield self._sum(gradients, shares, dtype)

    def _sum(self, gradients: Sequence[Tensor], shares: Sequence[float], dtype: torch.dtype) -> tuple[Tensor, float]:
        """The weighted sum in rank order and a scale still to be applied. One of weight 1 is used where it lies."""
        first, share = gradients[0], shares[0]
        if len(gradients) == 1 and share == 1 and first.dtype == dtype:
            return first, 1.0
        total = self._room(first.shape[0], dtype)
        if any(other != share for other in shares):
            total.copy_(first).mul_(share)
            for gradient, other in zip(gradients[1:], shares[1:], strict=True):
                total.add_(gradient, alpha=other)
            return total, 1.0
        rest = gradients[1:]
        if rest and first.dtype == dtype:
            torch.add(first, rest[0], out=total)
            rest = rest[1:]
        else:
            total.copy_(first)
        for gradient in rest:
            total.add_(gradient)
        return total, share

    def _copy(self, piece: Piece, outputs: Sequence[Window]) -> None:
        for chunk in range(piece.start, piece.stop, CHUNK):
            stop = min(piece.stop, chunk + CHUNK)
            weights = self.weights(Piece(piece.segment, chunk, stop, piece.local + chunk - piece.start))
            for output in outputs:
                _copy_into(output.view(piece.segment, chunk, stop), weights)

    def _room(self, length: int, dtype: torch.dtype) -> Tensor:
        room = self._scratch.get(dtype)
        if room is None:
            room = self._scratch[dtype] = torch.empty(CHUNK, dtype=dtype)
        return room[:length]

    def _size(self, segment: Segment) -> int:
        return self._layout.stored(segment, self._rank)


def _split(array: Tensor) -> Sequence[Tensor]:
    """Chunk by chunk. Most pieces of a small network are one: calling torch for that is a third of their update."""
    return (array,) if array.numel() <= CHUNK else torch.split(array, CHUNK)


def _together(arrays: Sequence[Tensor]) -> Iterable[tuple[Tensor, ...]]:
    """Chunk by chunk, all arrays at once; for no arrays, for ever nothing."""
    return zip(*(_split(array) for array in arrays), strict=True) if arrays else itertools.repeat(())


def _chunks(window: Window, piece: Piece) -> Iterable[Tensor]:
    """A piece of a window chunk by chunk: what is multiplied out is made just before it is used."""
    if not isinstance(window, Factored):
        return _split(window.view(*piece[:3]))
    starts = range(piece.start, piece.stop, CHUNK)
    return (window.view(piece.segment, start, min(start + CHUNK, piece.stop)) for start in starts)


def _without_seams(piece: Piece, windows: Sequence[Window]) -> Iterable[Piece]:
    """A piece cut where it is not contiguous in some window."""
    cuts = sorted({at for window in windows for at in window.seams(*piece[:3])})
    if not cuts:
        return (piece,)
    bounds = [piece.start, *cuts, piece.stop]
    return [
        Piece(piece.segment, low, high, piece.local + low - piece.start) for low, high in itertools.pairwise(bounds)
    ]


def _copy_into(target: Tensor, source: Tensor) -> None:
    """Both are contiguous. The C library's copy spares the bus the reading of what is overwritten: 6 % of a step."""
    if target.dtype == source.dtype:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
    else:
        target.copy_(source)
