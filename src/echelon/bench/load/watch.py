"""What is measured of a job under load, and when it has failed. Pure: times and figures are given.

`Watch` takes the number of updates that all servers have applied so far, and the memory of all processes. It says when
no update has been applied for too long, and how much the memory has grown since all processes were at work.
"""

from __future__ import annotations

from dataclasses import dataclass

DEADLOCK_S = 30.0
START_S = 180.0  # until the first update: 72 processes start one after the other on two cores
SETTLED_S = 60.0  # after the first update, or a fifth of the run if that is shorter: what memory is compared with
MAX_GROWTH = 0.10
TRAINING_SHARE = 0.95  # of the time from the first update on, in which no worker has ended


@dataclass(frozen=True, slots=True)
class Memory:
    """The bytes that all processes of a job use at one moment."""

    at: float
    num_bytes: int
    num_processes: int


class Watch:
    """The progress and the memory of one job. Times are seconds of one clock."""

    def __init__(self, began: float, training_s: float) -> None:
        """`training_s`: how long each worker trains."""
        self._began = began
        self._training_s = training_s
        self._first: tuple[float, int] | None = None
        self._last = (began, 0)  # when the number of updates last grew, and the number
        self._memory: list[Memory] = []
        self.longest_pause_s = 0.0  # without an update, after the first one

    def add_updates(self, at: float, updates: int) -> None:
        """Take the number of updates so far."""
        if updates <= self._last[1]:
            return
        if self._first is None:
            self._first = (at, updates)
        else:
            self.longest_pause_s = max(self.longest_pause_s, at - self._last[0])
        self._last = (at, updates)

    def add_memory(self, memory: Memory) -> None:
        """Take the memory of all processes."""
        self._memory.append(memory)

    @property
    def began_at(self) -> float | None:
        """When the first update was applied."""
        return None if self._first is None else self._first[0]

    def deadlock(self, now: float) -> str | None:
        """Return why the job counts as deadlocked, or None."""
        at, updates = self._last
        waited = now - at
        if not updates:
            return f"no update within {waited:.0f} s of the start" if waited > START_S else None
        return f"no update was applied for {waited:.0f} s, after {updates}" if waited > DEADLOCK_S else None

    def updates_per_s(self) -> float:
        """Return the updates per second between the first and the last one."""
        if self._first is None or self._first == self._last:
            return 0.0
        return (self._last[1] - self._first[1]) / (self._last[0] - self._first[0])

    def settled_and_last_bytes(self) -> tuple[int, int]:
        """Return the memory when all processes had worked for a while, and when they last worked together.

        A worker that ends does not count: Python then writes to all its objects, so that pages that a forked process
        has shared until then become its own.
        """
        if self._first is None:
            return 0, 0
        begin = self._first[0]
        end = min(self._last[0], begin + TRAINING_SHARE * self._training_s)
        busy = [memory for memory in self._memory if begin <= memory.at <= end]
        whole = max((memory.num_processes for memory in busy), default=0)
        settled_at = begin + min(SETTLED_S, (end - begin) / 5)
        compared = [m.num_bytes for m in busy if m.num_processes == whole and m.at >= settled_at]
        return (compared[0], compared[-1]) if compared else (0, 0)

    def growth(self) -> float:
        """Return by which share the memory has grown since it had settled."""
        settled, last = self.settled_and_last_bytes()
        return last / settled - 1.0 if settled else 0.0
