"""The barriers of one store of a job: which workers have reached which barrier, and which have closed the store."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.cluster.messages import Forbidden


class Barriers:
    """Barriers are numbered from 1, and every worker reaches them in this order."""

    def __init__(self) -> None:
        self.closed: set[int] = set()  # the ranks of the workers that have closed the store
        self._ending: set[int] = set()  # the ranks of the workers that wait until all others are ending, too
        self._reached: dict[int, int] = {}  # rank -> the last barrier that it reached
        self._done = 0

    def reach(self, rank: int, sequence: int) -> None:
        """Record that a worker has reached a barrier, which must be the one after its last."""
        last = self._reached.get(rank, 0)
        if sequence != last + 1:
            raise Forbidden(f"it reaches barrier {sequence} after barrier {last}")
        self._reached[rank] = sequence

    def close(self, rank: int) -> None:
        """Record that a worker has closed the store: no barrier waits for it."""
        self.closed.add(rank)

    def end(self, rank: int) -> None:
        """Record that a worker waits for the end of all others: no barrier waits for it."""
        self._ending.add(rank)

    def has_ended(self, members: Sequence[int]) -> bool:
        """Return whether all of these workers wait for the end."""
        return self._ending.issuperset(members)

    def complete(self, members: Sequence[int]) -> int | None:
        """Return the last barrier that these workers have all reached, or None if it was returned before."""
        reached = min((self._reached.get(rank, 0) for rank in members if rank not in self._ending), default=0)
        if reached <= self._done:
            return None
        self._done = reached
        return reached
