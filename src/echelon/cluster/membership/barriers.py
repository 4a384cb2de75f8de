"""The barriers of one store of a job: which workers have reached which barrier, and which wait for the end."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.cluster.messages import Forbidden


class Barriers:
    """Barriers are numbered from 1, and every worker reaches them in this order.

    A worker that comes late begins after the barriers that others have reached before it.
    """

    def __init__(self) -> None:
        self.done = 0  # the last barrier that is complete
        self.outside: set[int] = set()  # late workers that have opened the store, and do not take part yet
        self._ending: set[int] = set()  # the ranks of the workers that wait until all others are ending, too
        self._reached: dict[int, int] = {}  # rank -> the last barrier that it reached

    @property
    def begun(self) -> int:
        """The last barrier that a worker has reached."""
        return max(self.done, *self._reached.values()) if self._reached else self.done

    def enter(self, rank: int) -> None:
        """Let a late worker take part from the first barrier on that nobody has reached yet."""
        self.outside.discard(rank)
        self._reached[rank] = self.begun

    def restore(self, rank: int, reached: int, done: int, *, ending: bool) -> None:
        """Adopt what a worker reports: the barriers that it has reached, those that are done, and if it waits."""
        self.outside.discard(rank)
        self._reached[rank] = reached
        self.done = max(self.done, done)
        if ending:
            self._ending.add(rank)

    def reach(self, rank: int, sequence: int) -> None:
        """Record that a worker has reached a barrier, which must be the one after its last."""
        last = self._reached.get(rank, 0)
        if sequence != last + 1:
            raise Forbidden(f"it reaches barrier {sequence} after barrier {last}")
        self._reached[rank] = sequence

    def end(self, rank: int) -> None:
        """Record that a worker waits for the end of all others: no barrier waits for it."""
        self._ending.add(rank)

    def remove(self, rank: int) -> None:
        """Forget a worker that has left the job: another process may have its rank later."""
        self.outside.discard(rank)
        self._ending.discard(rank)
        self._reached.pop(rank, None)

    def has_ended(self, members: Sequence[int]) -> bool:
        """Return whether all of these workers wait for the end."""
        return self._ending.issuperset(members)

    def complete(self, members: Sequence[int]) -> int | None:
        """Return the last barrier that these workers have all reached, or None if it was returned before."""
        reached = min((self._reached.get(rank, 0) for rank in members if rank not in self._ending), default=0)
        if reached <= self.done:
            return None
        self.done = reached
        return reached
