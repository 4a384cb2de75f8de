"""A set of positions, kept as disjoint intervals: an epoch has millions of positions and few intervals."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

Interval = tuple[int, int]  # the positions from the first number to before the second one


class IntervalSet:
    """A mutable set of integers, kept as the intervals [start, stop) that do not touch each other."""

    def __init__(self, intervals: Iterable[Interval] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in intervals:
            self.add(start, stop)

    def add(self, start: int, stop: int) -> None:
        """Add the positions [start, stop), of which some may be in the set already."""
        if stop <= start:
            return
        first, last = bisect_left(self._stops, start), bisect_right(self._starts, stop)  # those that touch it
        if first < last:
            start, stop = min(start, self._starts[first]), max(stop, self._stops[last - 1])
        self._starts[first:last], self._stops[first:last] = [start], [stop]

    def remove(self, start: int, stop: int) -> None:
        """Remove the positions [start, stop), of which some may not be in the set."""
        first = bisect_right(self._stops, start)
        last = bisect_left(self._starts, stop)
        if first >= last or stop <= start:
            return
        before, after = (self._starts[first], start), (stop, self._stops[last - 1])
        kept = [(a, b) for a, b in (before, after) if a < b]
        self._starts[first:last], self._stops[first:last] = [a for a, _ in kept], [b for _, b in kept]

    def take_first(self, limit: int) -> Interval:
        """Remove and return the first adjacent positions, at most `limit`. Of an empty set, return (0, 0)."""
        if not self._starts or limit <= 0:
            return 0, 0
        start = self._starts[0]
        stop = min(self._stops[0], start + limit)
        self.remove(start, stop)
        return start, stop

    def covers(self, start: int, stop: int) -> bool:
        """Return whether all positions [start, stop) are in the set."""
        at = bisect_right(self._starts, start) - 1
        return stop <= start or (at >= 0 and stop <= self._stops[at])

    def meets(self, start: int, stop: int) -> bool:
        """Return whether any of the positions [start, stop) is in the set."""
        at = bisect_right(self._stops, start)
        return start < stop and at < len(self._starts) and self._starts[at] < stop

    def without(self, others: Iterable[Interval]) -> IntervalSet:
        """Return the positions of this set that are in none of the given intervals."""
        left = IntervalSet(self)
        for start, stop in others:
            left.remove(start, stop)
        return left

    def within(self, other: IntervalSet) -> IntervalSet:
        """Return the positions of this set that are also in another one."""
        return self.without(self.without(other))

    def __iter__(self) -> Iterator[Interval]:
        return iter(list(zip(self._starts, self._stops, strict=True)))

    def __len__(self) -> int:
        """Return how many positions are in the set."""
        return sum(self._stops) - sum(self._starts)

    def __bool__(self) -> bool:
        return bool(self._starts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IntervalSet) and (self._starts, self._stops) == (other._starts, other._stops)

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        return f"IntervalSet({list(self)})"
