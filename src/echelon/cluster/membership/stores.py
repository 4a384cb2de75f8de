"""The stores of a job: which worker has which of them open, and their barriers.

A worker numbers its stores in the order of their creation. Each store has barriers of its own, which do not wait for a
worker that has closed the store. A late worker, which joined a job that was running, takes part in the barriers of a
store from the moment on at which it says so (`enter`), unless no barrier of the store is complete yet.

A store that nobody uses is forgotten if the last worker that used it has closed it. If that one died, the servers still
have its values and the workers that are started again are late.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from echelon.cluster.membership.barriers import Barriers
from echelon.cluster.messages import Forbidden, Return, StoreProgress, StoreState

MAX_OPEN_STORES = 1000  # of one worker at the same time


class Completed(NamedTuple):
    """What has become complete in a store, and the workers that wait for it."""

    members: list[int]
    barrier: int | None
    has_ended: bool


class Halted(NamedTuple):
    """Why the workers of a store stop training, and how many barriers were done before."""

    reason: str
    barriers_done: int


class Stores:
    """The open stores of all workers, by rank, and the barriers of each store, by its number."""

    def __init__(self) -> None:
        self._barriers: dict[int, Barriers] = {}
        self._open: dict[int, set[int]] = {}  # rank -> the numbers of its open stores, once it has opened one
        self._num_opened: dict[int, int] = {}  # rank -> how many stores it has opened so far
        self._halted: dict[int, Halted] = {}  # by the number of the store
        self._deserted: set[int] = set()  # the stores whose last user died
        self.late: set[int] = set()  # the ranks of workers that joined when the job was running

    @property
    def numbers(self) -> list[int]:
        """The stores that a worker has open, or that have barriers."""
        return sorted({*self._barriers, *(number for numbers in self._open.values() for number in numbers)})

    @property
    def with_barriers(self) -> list[int]:
        """The stores of which a worker has reached a barrier or waits for the end."""
        return list(self._barriers)

    @property
    def progress(self) -> list[StoreProgress]:
        """How far the stores are."""
        return [StoreProgress(number, self.num_done(number), self._closed_by(number)) for number in self.numbers]

    def _closed_by(self, number: int) -> list[int]:
        return [rank for rank in sorted(self._num_opened) if self.has_closed(rank, number)]

    def open_by(self, rank: int) -> set[int]:
        """Return the stores that a worker has open."""
        return self._open.get(rank, set())

    def has_closed_all(self, rank: int) -> bool:
        """Return whether a worker has opened stores, and closed all of them."""
        return self._open.get(rank) == set()

    def has_closed(self, rank: int, number: int) -> bool:
        """Return whether a worker has closed a store."""
        return number < self._num_opened.get(rank, 0) and number not in self.open_by(rank)

    def check_open(self, rank: int, number: int) -> None:
        """Raise Forbidden if a worker has not opened a store, or has closed it."""
        if number not in self.open_by(rank):
            raise Forbidden(f"it uses store {number}, which it has not opened or has closed")

    def open(self, rank: int, number: int) -> None:
        """Record that a worker has created a store."""
        expected = self._num_opened.get(rank, 0)
        if number != expected:
            raise Forbidden(f"it opens store {number}, but its next one is store {expected}")
        if len(self.open_by(rank)) >= MAX_OPEN_STORES:
            raise Forbidden(f"it opens store {number}, although {MAX_OPEN_STORES} are open: close some before")
        self._num_opened[rank] = number + 1
        self._open.setdefault(rank, set()).add(number)
        self._deserted.discard(number)
        if rank in self.late and self.num_done(number):
            self._of(number).outside.add(rank)

    def num_done(self, number: int) -> int:
        """Return how many barriers of a store are complete."""
        return self._barriers[number].done if number in self._barriers else 0

    def is_outside(self, rank: int, number: int) -> bool:
        """Return whether a late worker does not take part in the barriers of a store yet, or has not opened it."""
        if not self.num_done(number):
            return False
        return rank in self._barriers[number].outside or (rank in self.late and self._num_opened.get(rank, 0) <= number)

    def enter(self, rank: int, number: int) -> int:
        """Let a late worker take part in the barriers of a store. Return how many have begun without it."""
        self.check_open(rank, number)
        barriers = self._of(number)
        if rank in barriers.outside:
            barriers.enter(rank)
        return barriers.begun

    def reach(self, rank: int, number: int, sequence: int) -> None:
        """Record that a worker has reached a barrier of a store."""
        self.check_open(rank, number)
        if self.is_outside(rank, number):
            raise Forbidden(f"it reaches barrier {sequence} of store {number}, in which it does not take part yet")
        barriers = self._of(number)
        barriers.reach(rank, sequence)
        barriers.outside.discard(rank)  # it took part, because no barrier was complete: `restore` did not know that

    def end(self, rank: int, number: int) -> None:
        """Record that a worker waits until all others have no more pushes to a store."""
        self.check_open(rank, number)
        self._of(number).outside.discard(rank)
        self._of(number).end(rank)

    def close(self, rank: int, number: int) -> None:
        """Record that a worker has closed a store."""
        self.check_open(rank, number)
        self._open[rank].remove(number)

    def halt(self, number: int, reason: str) -> None:
        """Record why the workers of a store stop training. The first reason counts."""
        self._halted.setdefault(number, Halted(reason, self.num_done(number)))

    def halted(self, number: int) -> Halted | None:
        """Return why the workers of a store stop training, or None."""
        return self._halted.get(number)

    def remove(self, rank: int) -> None:
        """Forget a worker that has left the job."""
        abandoned = self._open.pop(rank, set())
        self._num_opened.pop(rank, None)
        self._deserted |= abandoned.difference(*self._open.values())
        self.late.discard(rank)
        for barriers in self._barriers.values():
            barriers.remove(rank)

    def restore(self, rank: int, report: Return) -> list[int]:
        """Adopt what a worker that has returned reports. Return the stores that it has closed meanwhile."""
        states: dict[int, StoreState] = {state.number: state for state in report.stores}
        closed = sorted(self.open_by(rank) - states.keys())
        self._open[rank] = set(states)
        self._num_opened[rank] = max([report.num_opened, *(number + 1 for number in states)], default=0)
        if not self._num_opened[rank]:  # it has not opened one, which is not the same as having closed all
            del self._open[rank], self._num_opened[rank]
        for state in report.stores:
            barriers = self._of(state.number)
            if state.takes_part or state.ending:  # the end of a store also waits for a late worker that waits for it
                barriers.restore(rank, state.barriers, state.barriers_done, ending=state.ending)
            else:
                barriers.outside.add(rank)
                barriers.done = max(barriers.done, state.barriers_done)
        return closed

    def complete(self, number: int, workers: Iterable[int]) -> Completed:
        """Return what is complete now. A store that nobody uses is forgotten, unless its last user died."""
        users = [rank for rank in workers if not self.has_closed(rank, number)]
        barriers = self._of(number)
        members = [rank for rank in users if not self.is_outside(rank, number)]
        completed = Completed(members, barriers.complete(members), bool(members) and barriers.has_ended(members))
        if not users and number not in self._deserted:
            del self._barriers[number]
            self._halted.pop(number, None)
        return completed

    def _of(self, number: int) -> Barriers:
        return self._barriers.setdefault(number, Barriers())
