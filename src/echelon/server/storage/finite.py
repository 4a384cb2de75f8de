"""Notices NaN and infinity in updates, and finds whose gradient has them.

Every update is checked, chunk by chunk, while the chunk is in the cache: the sum of its elements is finite only if all
of them are. One sum is cheaper than torch.isfinite, which writes a tensor of the same length. The sum may overflow
although all elements are finite, so a second, exact pass decides; it runs only then. The first finding of each key is
kept. The values themselves are not changed: the update runs as in torch.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.cluster.placement import Layout, Piece, Slot

MAX_FINDINGS = 1000  # after so many keys nothing is searched any more


class Origin(NamedTuple):
    """Whose gradients an update has, in their order, and the clock of their round."""

    workers: tuple[int, ...]
    clock: int


class Finding(NamedTuple):
    """A key that got NaN or infinity. `worker` None: all gradients were finite, but not their sum.

    `clock` None: no update was seen to bring it, as when a finite gradient and a large learning rate overflow.
    """

    key: int
    worker: int | None
    clock: int | None


class GradientOf(NamedTuple):
    """Access to a worker's gradient, to find out whether it is finite."""

    worker: int
    view: Callable[[int, int, int], Tensor]  # of a segment: elements [start, stop)


def is_finite(values: Tensor) -> bool:
    """Return whether no element is NaN or infinite. Fast if they are finite and their sum does not overflow."""
    if not values.is_floating_point():
        return True
    return math.isfinite(values.sum().item()) or bool(torch.isfinite(values).all())


class FiniteCheck:
    """The findings of one store."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.first: dict[int, Finding] = {}  # by key
        self._new: list[Finding] = []
        self._sorted: dict[int, list[Slot]] = {}  # segment -> its dense keys by their start
        self._num_slots = 0

    def take(self) -> list[Finding]:
        """Return the findings since the last call."""
        found, self._new = self._new, []
        return found

    def forget(self, keys: Iterable[int]) -> None:
        """Forget the findings of keys whose values were overwritten."""
        if self.first:
            for key in keys:
                self.first.pop(key, None)

    def examine(self, total: Tensor, scale: float, place: Piece, clock: int, gradients: Sequence[GradientOf]) -> None:
        """Record the keys of a place whose part of the sum is not finite, and the first worker that caused it."""
        if len(self.first) >= MAX_FINDINGS:
            return
        for slot in self._keys_in(place):
            if slot.key in self.first:
                continue
            start, stop = max(place.start, slot.start), min(place.stop, slot.start + slot.length)
            part = total[start - place.start : stop - place.start]
            if not (math.isfinite(scale) and is_finite(part)):
                bad = (one.worker for one in gradients if not is_finite(one.view(place.segment, start, stop)))
                self.add(slot.key, next(bad, None), clock)

    def add(self, key: int, worker: int | None, clock: int) -> None:
        """Record a finding, unless the key has one."""
        if key not in self.first and len(self.first) < MAX_FINDINGS:
            self.first[key] = Finding(key, worker, clock)
            self._new.append(self.first[key])

    def _keys_in(self, place: Piece) -> list[Slot]:
        """Return the keys of which a place has elements, without their padding."""
        if self._num_slots != len(self._layout.slots):
            self._num_slots = len(self._layout.slots)
            self._sorted.clear()
            for slot in sorted(self._layout.slots.values(), key=lambda slot: slot.start):
                if not slot.spec.row_sparse:
                    self._sorted.setdefault(slot.segment, []).append(slot)
        slots = self._sorted.get(place.segment, [])
        first = max(0, bisect.bisect_right(slots, place.start, key=lambda slot: slot.start) - 1)
        last = bisect.bisect_left(slots, place.stop, key=lambda slot: slot.start)
        return [slot for slot in slots[first:last] if slot.start + slot.length > place.start]
