"""The workers that were told to end (SIGTERM). Pure.

A signal to the whole job reaches its workers at slightly different times. Therefore nobody may leave at once: if all
living workers were told to end, the job stops and saves, as a whole; otherwise those that were told to leave do.
"""

from __future__ import annotations

from collections.abc import Collection

from echelon.cluster.membership.patience import Patience

GATHER_S = 0.5  # from the first announcement until those that have announced it may leave


class Leavers:
    """The ranks of the workers that have announced that they leave, and their reasons."""

    def __init__(self) -> None:
        self._reasons: dict[int, str] = {}
        self._answered: set[int] = set()
        self._patience = Patience()

    def __contains__(self, rank: int) -> bool:
        return rank in self._reasons

    def announce(self, rank: int, reason: str) -> None:
        """Record that a worker was told to end."""
        self._reasons.setdefault(rank, reason)

    def remove(self, rank: int) -> None:
        """Forget a worker that has left."""
        self._reasons.pop(rank, None)
        self._answered.discard(rank)

    def reason_if_all(self, workers: Collection[int]) -> str | None:
        """Return the first reason if all of these workers were told to end, otherwise None."""
        if not workers or not self._reasons.keys() >= set(workers):
            return None
        return next(iter(self._reasons.values()))

    def due(self, now: float) -> list[int]:
        """Return the workers that may leave now, each once."""
        waiting = [rank for rank in self._reasons if rank not in self._answered]
        if self._patience.lasted_s(now, bool(waiting)) < GATHER_S:
            return []
        self._answered.update(waiting)
        return waiting
