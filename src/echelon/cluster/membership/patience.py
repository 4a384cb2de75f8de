"""How long something has lasted, by the ticks of a state machine. The events themselves need no time."""

from __future__ import annotations


class Patience:
    """Measures how long a condition has held, from the first tick that found it."""

    def __init__(self) -> None:
        self._since: float | None = None

    def lasted_s(self, now: float, condition: bool) -> float:
        """Return for how many seconds the condition has held without a break, or -1 if it does not hold."""
        if not condition:
            self._since = None
            return -1.0
        if self._since is None:
            self._since = now
        return now - self._since
