"""The barriers of one store of a job: which workers have reached which barrier, and which have closed the store."""

from __future__ import annotations

from collections.abc import Sequence


class Barriers:
    """Barriers are numbered from 1, and every worker reaches them in this order."""

    def __init__(self) -> None:
        self.closed: set[int] = set()  # the ranks of the workers that have closed the store
        self._reached: dict[int, int] = {}  # rank -> the last barrier that it reached
        self._done = 0

    def reach(self, rank: int, sequence: int) -> None:
        """Record that a worker has reached a barrier."""
        self._reached[rank] = sequence

    def close(self, rank: int) -> None:
        """Record that a worker has closed the store: no barrier waits for it."""
        self.closed.add(rank)

    def complete(self, members: Sequence[int]) -> list[int]:
        """Return the barriers that these workers have all reached and that were not returned before."""
        before = self._done
        while members and all(self._reached.get(rank, 0) > self._done for rank in members):
            self._done += 1
        return list(range(before + 1, self._done + 1))
