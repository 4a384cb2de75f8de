"""A wait with a deadline that prints, at regular intervals, what the process is waiting for."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable


class Deadline:
    """Starts when it is created, expires after `timeout_s`, and reports at most every `stall_seconds`."""

    def __init__(self, who: str, timeout_s: float, stall_seconds: float) -> None:
        self._who = who
        self._timeout_s = timeout_s
        self._stall_seconds = stall_seconds
        self._began = time.monotonic()
        self._next_report = self._began + stall_seconds

    @property
    def left_s(self) -> float:
        """The seconds left, at least 0.1: many functions take a timeout of 0 as "no timeout"."""
        return max(self._began + self._timeout_s - time.monotonic(), 0.1)

    @property
    def expired(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self._began + self._timeout_s

    def report(self, what: Callable[[], str]) -> None:
        """Print what this process waits for, if a report is due."""
        now = time.monotonic()
        if now < self._next_report:
            return
        self._next_report += self._stall_seconds
        waited = f"{self._who} (pid {os.getpid()}) has waited {now - self._began:.1f} s for {what()}"
        print(f"{waited}, and waits up to {self._timeout_s:g} s (ECHELON_TIMEOUT)", file=sys.stderr, flush=True)
