"""Time as a process counts it that judges others by their silence: only while it runs itself."""

from __future__ import annotations

LATE_S = 1.0  # a turn of a loop that takes longer was interrupted: the loops wait for half a second at most


class AwakeClock:
    """A clock without the time in which this process was stopped or did not get a core.

    Messages that arrived meanwhile are still unread, and processes of the same machine may have been stopped, too.
    Therefore that time does not count as silence of anybody, and nobody is judged before the next turn has read.
    """

    def __init__(self, now: float) -> None:
        self._last = now
        self._late = 0.0
        self.was_late = False  # in this turn

    def tick(self, now: float) -> float:
        """Begin a turn; return the time without all interruptions."""
        gap = now - self._last
        self._last = now
        self.was_late = gap > LATE_S
        if self.was_late:
            self._late += gap
        return now - self._late
