"""Runs updates and copies: sums gradients, applies the optimizer and writes new weights to workers.

A step reads the gradients of every worker, updates the weights and the optimizer state, and writes every worker's copy
of the weights. `Storage.run` does all of this for one chunk that fits the CPU cache before it starts the next chunk. So
each byte crosses the memory bus once, instead of once for every array operation.

Neighbouring keys that are treated alike form one run, so the cost does not grow with the number of keys.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.cluster.placement import ITEM_BYTES, Layout, Piece, Segment, join
from echelon.errors import UsageError
from echelon.fault_points import fault_point
from echelon.server.optimizer.class_kernels import State, WholeClass
from echelon.server.optimizer.kernel import Kernel, Step
from echelon.server.storage.factored import Factored, summed_blocks
from echelon.server.storage.finite import FiniteCheck, GradientOf, Origin, is_finite
from echelon.server.storage.keys_cache import KeysCache
from echelon.server.storage.memory import Window, master_dtype, zeros
from echelon.server.storage.rows import PushedRows
from echelon.server.storage.tables import RowUpdate, Tables, WeightedRows

_SMALLEST_SCALE = 1e-30  # that kernels apply themselves: they divide by its inverse, which must be finite in float32
CHUNK = 131_072  # elements, half a megabyte of float32: smaller chunks cost more calls, larger ones leave the cache


class WeightedGradient(NamedTuple):
    """A worker's gradient and its weight in the sum."""

    window: Window
    weight: float


class Update(NamedTuple):
    """How keys are updated. `kernel` None: the sum replaces the weights. Keys with equal updates can share a run."""

    gradients: tuple[WeightedGradient, ...]
    kernel: Kernel | None
    step: Step
    origin: Origin | None = None  # with it, the sum is checked for NaN and infinity


class Task(NamedTuple):
    """The update of some keys, if any, and the windows that their new weights are copied to."""

    keys: tuple[int, ...]
    update: Update | RowUpdate | None
    outputs: tuple[Window, ...]


class Storage:
    """The weights and optimizer states of one server, packed."""

    def __init__(self, layout: Layout, rank: int) -> None:
        self.tables = Tables(layout, rank)
        self.finite = FiniteCheck(layout)
        self._layout = layout
        self._rank = rank
        self._weights: dict[int, Tensor] = {}
        self._states: dict[int, dict[str, Tensor]] = {}  # segment -> name -> state
        self.objects: dict[int, State] = {}  # key -> its state in the form of an optimizer class
        self._scratch: dict[torch.dtype, Tensor] = {}
        self._wide_scratch = torch.empty(CHUNK, dtype=torch.float64)
        self._joined: KeysCache[list[Piece]] = KeysCache()

    @property
    def num_bytes(self) -> int:
        """The bytes of all segments, on all servers."""
        return sum(segment.capacity * ITEM_BYTES[segment.dtype] for segment in self._layout.segments)

    def reserve(self, keys: Sequence[int]) -> None:
        """Map the memory for the weights of keys. Raise UsageError if there is none."""
        for index in {self._layout.slots[key].segment for key in keys}:
            try:
                self.weights(Piece(index, 0, 0, 0))
            except (OSError, OverflowError, MemoryError) as error:
                raise UsageError(f"no memory for {self._layout.segments[index]}: {error}") from error

    def stored_weights(self) -> dict[int, Tensor]:
        """Return the weights of all segments that are stored here, by the number of the segment."""
        return dict(self._weights)

    def forget(self, segments: int) -> None:
        """Free the weights of the segments from a number on, which have no keys."""
        for index in [index for index in self._weights if index >= segments]:
            del self._weights[index]

    def weights(self, piece: Piece) -> Tensor:
        """Return the stored weights of a piece, as a view."""
        stored = self._weights.get(piece.segment)
        if stored is None:
            segment = self._layout.segments[piece.segment]
            stored = self._weights[piece.segment] = zeros(self._size(segment), master_dtype(segment.dtype))
        return stored[piece.local : piece.local + piece.stop - piece.start]

    def states(self, piece: Piece, names: Sequence[str]) -> list[Tensor]:
        """Return optimizer states of a piece by name, as views. They are created at first use, as zeros."""
        stop = piece.local + piece.stop - piece.start
        return [self._state(piece.segment, name)[piece.local : stop] for name in names]

    def clear_states(self, piece: Piece) -> None:
        """Forget the optimizer states of a piece."""
        for state in self._states.get(piece.segment, {}).values():
            state[piece.local : piece.local + piece.stop - piece.start].zero_()

    def _state(self, index: int, name: str) -> Tensor:
        states = self._states.setdefault(index, {})
        if name not in states:
            segment = self._layout.segments[index]
            states[name] = zeros(self._size(segment), master_dtype(segment.dtype))
        return states[name]

    def run(self, tasks: Sequence[Task]) -> None:
        """Run tasks in order. Neighbouring tasks with equal updates and outputs run together."""
        start = 0
        for index in range(1, len(tasks) + 1):
            if index == len(tasks) or tasks[index][1:] != tasks[start][1:]:
                self._run_equal(tasks[start:index])
                start = index

    def squared_norm(
        self, keys: tuple[int, ...], pushed: Sequence[Window | PushedRows], shares: Sequence[float]
    ) -> float:
        """Return the squared norm of a weighted sum over some keys, added in float64 and in a fixed order.

        The padding between keys is zero in all gradients, so neighbouring keys are one piece here, too.
        """
        square = 0.0
        rows = [one for one in pushed if isinstance(one, PushedRows)]
        if rows:
            weighted_rows = [WeightedRows(one, share) for one, share in zip(rows, shares, strict=True)]
            return sum(self.tables.squared_norm(key, weighted_rows) for key in keys)
        windows = [one for one in pushed if not isinstance(one, PushedRows)]
        gradients = [WeightedGradient(window, share) for window, share in zip(windows, shares, strict=True)]
        pieces = self._joined_pieces(keys) if gradients else ()
        for piece in itertools.chain.from_iterable(_cut_at_seams(piece, windows) for piece in pieces):
            dtype = master_dtype(self._layout.segments[piece.segment].dtype)
            for total, scale in self._sums(gradients, piece, dtype):
                wide = total if dtype is torch.float64 else self._wide_scratch[: total.shape[0]].copy_(total)
                square += float(torch.dot(wide, wide)) * scale * scale
        return square

    def _run_equal(self, tasks: Sequence[Task]) -> None:
        _, update, outputs = tasks[0]
        keys = tasks[0].keys if len(tasks) == 1 else tuple(itertools.chain.from_iterable(task.keys for task in tasks))
        if isinstance(update, RowUpdate):
            self._check_rows(keys, update)
            self.tables.update(keys, update)
            return
        if update is not None and update.kernel is not None and update.kernel.whole:
            for key in keys:
                self._update_whole(key, update, update.kernel, outputs)
            return
        exact = update is not None and update.kernel is not None and update.kernel.exact
        pieces = self._exact_pieces(keys) if exact else self._joined_pieces(keys)
        windows = [*(gradient.window for gradient in update.gradients), *outputs] if update else outputs
        for piece in itertools.chain.from_iterable(_cut_at_seams(piece, windows) for piece in pieces):
            if update is None:
                self._copy(piece, outputs)
            else:
                self._update(piece, update, outputs)

    def _joined_pieces(self, keys: tuple[int, ...]) -> list[Piece]:
        """Return the pieces of keys on this server with their padding, neighbours joined. Cached: requests repeat."""
        joined = self._joined.get(keys)
        if joined is None:
            slots = [self._layout.slots[key] for key in keys]
            joined = join(itertools.chain.from_iterable(self._layout.pieces(slot, self._rank) for slot in slots))
            self._joined.put(keys, joined)
        return joined

    def _exact_pieces(self, keys: tuple[int, ...]) -> list[Piece]:
        slots = [self._layout.slots[key] for key in keys]
        pieces = (self._layout.pieces(slot, self._rank, exact=True) for slot in slots)
        return list(itertools.chain.from_iterable(pieces))

    def _update(self, piece: Piece, update: Update, outputs: Sequence[Window]) -> None:
        weights = self.weights(piece)
        kernel, step = update.kernel, update.step
        states = self.states(piece, kernel.state_names) if kernel else []
        chunks = zip(
            _split(weights),
            self._sums(update.gradients, piece, weights.dtype),
            _split_together(states),
            _split_together([output.view(*piece[:3]) for output in outputs]),
            strict=False,
        )
        start = piece.start
        for weight, (total, scale), state, copies in chunks:
            if update.origin is not None and not (math.isfinite(scale) and is_finite(total)):
                place = Piece(piece.segment, start, start + len(total), piece.local + start - piece.start)
                self._examine(total, scale, place, update, update.origin)
            start += len(total)
            if scale != 1 and not (kernel and kernel.scales_gradient and scale >= _SMALLEST_SCALE):
                total, scale = total.mul_(scale), 1.0
            if kernel is None:
                weight.copy_(total)
            else:
                kernel.update(weight, total, state, step if scale == 1 else Step(*step[:3], scale))
            for copy in copies:
                _copy_into(copy, weight)
            fault_point("server.writing")

    def _update_whole(self, key: int, update: Update, kernel: Kernel, outputs: Sequence[Window]) -> None:
        """Update a key with a kernel that needs all of it at once. The key is on this server only."""
        windows = [*(gradient.window for gradient in update.gradients), *outputs]
        for whole in join(self._exact_pieces((key,))):
            weights = self.weights(whole)
            total = torch.empty_like(weights)
            shape = self._layout.slots[key].spec.shape
            pieces = list(_cut_at_seams(whole, windows))
            for piece in pieces:
                part = total[piece.start - whole.start : piece.stop - whole.start]
                self._sum_into(part, piece, update.gradients)
                if update.origin is not None and not is_finite(part):
                    self._examine(part, 1.0, piece, update, update.origin)
            arguments = weights.view(shape), total.view(shape)
            if isinstance(kernel, WholeClass):
                kernel.update_object(*arguments, self.objects.setdefault(key, {}), update.step)
            else:
                states = [state.view(shape) for state in self.states(whole, kernel.state_names)]
                kernel.update(*arguments, states, update.step)
            for piece in pieces:
                self._copy(piece, outputs)

    def _examine(self, total: Tensor, scale: float, place: Piece, update: Update, origin: Origin) -> None:
        """Find the keys and the worker of a sum that is not finite."""
        windows = (gradient.window.view for gradient in update.gradients)
        gradients = [GradientOf(worker, view) for worker, view in zip(origin.workers, windows, strict=True)]
        self.finite.examine(total, scale, place, origin.clock, gradients)

    def _check_rows(self, keys: Sequence[int], update: RowUpdate) -> None:
        if update.origin is None:
            return
        for worker, gradient in zip(update.origin.workers, update.gradients, strict=True):
            for key in keys:
                if not (math.isfinite(gradient.weight) and is_finite(gradient.rows.parts[key][1])):
                    self.finite.add(key, worker, update.origin.clock)

    def not_finite(self, keys: Iterable[int]) -> list[int]:
        """Return those of some keys whose stored values have NaN or infinity."""
        return [key for key in keys if not all(map(is_finite, self._values(key)))]

    def digest(self, keys: Iterable[int]) -> int:
        """Return a number that differs if the stored values of keys do, for the history."""
        found = 0
        for key in keys:
            for values in self._values(key):
                found = zlib.crc32(values.contiguous().view(torch.uint8).numpy().data, found)
        return found

    def _values(self, key: int) -> Iterator[Tensor]:
        if key in self.tables:
            yield self.tables[key].values
        else:
            yield from map(self.weights, self._exact_pieces((key,)))

    def _sum_into(self, target: Tensor, piece: Piece, gradients: Sequence[WeightedGradient]) -> None:
        sums = self._sums(gradients, piece, target.dtype)
        for part, (total, scale) in zip(_split(target), sums, strict=True):
            torch.mul(total, scale, out=part)

    def _sums(
        self, gradients: Sequence[WeightedGradient], piece: Piece, dtype: torch.dtype
    ) -> Iterator[tuple[Tensor, float]]:
        """Yield the weighted sum over a piece, chunk by chunk, each with a scale that is still to be applied."""
        shares = [gradient.weight for gradient in gradients]
        factored = [gradient.window for gradient in gradients if isinstance(gradient.window, Factored)]
        if len(factored) == len(gradients) and len(set(shares)) == 1:
            for block in summed_blocks(factored, piece):
                for total in _split(block):
                    yield total, shares[0]
        else:
            for chunks in zip(*(_chunks(gradient.window, piece) for gradient in gradients), strict=True):
                yield self._sum(chunks, shares, dtype)

    def _sum(self, gradients: Sequence[Tensor], shares: Sequence[float], dtype: torch.dtype) -> tuple[Tensor, float]:
        """Return the weighted sum in rank order and a scale to apply. A single gradient of weight 1 is not copied."""
        first, share = gradients[0], shares[0]
        if len(gradients) == 1 and share == 1 and first.dtype == dtype:
            return first, 1.0
        total = self._scratch_tensor(first.shape[0], dtype)
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
            fault_point("server.writing")

    def _scratch_tensor(self, length: int, dtype: torch.dtype) -> Tensor:
        scratch = self._scratch.get(dtype)
        if scratch is None:
            scratch = self._scratch[dtype] = torch.empty(CHUNK, dtype=dtype)
        return scratch[:length]

    def _size(self, segment: Segment) -> int:
        return self._layout.stored(segment, self._rank)


def _split(array: Tensor) -> Sequence[Tensor]:
    """Split into chunks. A small network has pieces of one chunk; torch.split would cost a third of their update."""
    return (array,) if array.numel() <= CHUNK else torch.split(array, CHUNK)


def _split_together(arrays: Sequence[Tensor]) -> Iterable[tuple[Tensor, ...]]:
    """Split all arrays into chunks and yield those of all arrays together. Without arrays, yield () forever."""
    return zip(*(_split(array) for array in arrays), strict=True) if arrays else itertools.repeat(())


def _chunks(window: Window, piece: Piece) -> Iterable[Tensor]:
    """Split a piece of a window into chunks. Factors are multiplied for each chunk just before it is used."""
    if not isinstance(window, Factored):
        return _split(window.view(*piece[:3]))
    starts = range(piece.start, piece.stop, CHUNK)
    return (window.view(piece.segment, start, min(start + CHUNK, piece.stop)) for start in starts)


def _cut_at_seams(piece: Piece, windows: Sequence[Window]) -> Iterable[Piece]:
    """Cut a piece where it is not contiguous in some window."""
    cuts = sorted({at for window in windows for at in window.seams(*piece[:3])})
    if not cuts:
        return (piece,)
    bounds = [piece.start, *cuts, piece.stop]
    return [
        Piece(piece.segment, low, high, piece.local + low - piece.start) for low, high in itertools.pairwise(bounds)
    ]


def _copy_into(target: Tensor, source: Tensor) -> None:
    """Copy contiguous memory. Unlike torch, memmove does not read what it overwrites; that saves 6 % of a step."""
    if target.dtype == source.dtype and len(target) == len(source):
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
    else:
        target.copy_(source)
