"""When the pushes of each worker arrive at a server: whose own time is long, and who comes late.

A worker's own time is that from the answer to its last push until its next push is complete: its forward and backward
pass, whatever else its loop does, and the transfer. It does not contain the time for which the server held the answer,
so a slow worker is recognised in lock-step, too, where all workers make the same number of steps.

Times are seconds of one monotonic clock. The medians are over the last steps, so that an occasional long step, such as
one with a validation, does not count.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from typing import Any

RECENT = 15  # steps


class _Worker:
    __slots__ = ("answered_at", "arrived_at", "began_at", "clock", "late", "own")

    def __init__(self) -> None:
        self.clock = -1  # of the newest push
        self.answered_at: float | None = None  # when the last answer was sent
        self.began_at: float | None = None  # when the own time of the newest clock began
        self.arrived_at = 0.0  # when the last push of the newest clock arrived
        self.own: deque[float] = deque(maxlen=RECENT)
        self.late: deque[float] = deque(maxlen=RECENT)


class Arrivals:
    """The arrivals at one server. A step may push several messages, and its last one counts."""

    def __init__(self, group_of: Callable[[int], int]) -> None:
        """`group_of` returns the group of a worker: its members push the rounds of one clock together."""
        self._group_of = group_of
        self._workers: dict[int, _Worker] = {}
        self._first: dict[int, tuple[int, float]] = {}  # group -> its newest clock, and when its first push arrived

    def pushed(self, worker: int, clock: int, now: float) -> None:
        """Record a push of a worker's clock."""
        one = self._workers.setdefault(worker, _Worker())
        if clock > one.clock:
            self._end_step(one)
            one.clock, one.began_at = clock, one.answered_at
            self._compare(worker, one, clock, now)
        one.arrived_at = now

    def answered(self, worker: int, now: float) -> None:
        """Record an answer to a worker."""
        if worker in self._workers:
            self._workers[worker].answered_at = now

    def remove(self, worker: int) -> None:
        """Forget a worker that has left."""
        self._workers.pop(worker, None)

    def report(self) -> dict[str, dict[str, Any]]:
        """Return each worker's newest clock, its own time and how late it comes, as medians over the last steps."""
        return {
            str(worker): {
                "clock": one.clock + 1,
                "own_s": round(statistics.median(one.own), 6) if one.own else None,
                "late_s": round(statistics.median(one.late), 6) if one.late else None,
            }
            for worker, one in sorted(self._workers.items())
        }

    def _end_step(self, one: _Worker) -> None:
        if one.began_at is not None:
            one.own.append(one.arrived_at - one.began_at)

    def _compare(self, worker: int, one: _Worker, clock: int, now: float) -> None:
        """Compare the arrival with the first one of the same round."""
        group = self._group_of(worker)
        newest, first_at = self._first.get(group, (-1, 0.0))
        if clock > newest:
            self._first[group] = clock, now
            one.late.append(0.0)
        elif clock == newest:
            one.late.append(now - first_at)
