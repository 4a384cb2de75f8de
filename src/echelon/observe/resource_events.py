"""Writes to the event log of a job, every few seconds, which resources its processes use on the launcher's machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict

from echelon.observe.events import EventLog

EVERY_S = 2.0  # a sample takes some milliseconds of the launcher's time


class ResourceEvents:
    """Call `tick` several times per second. Without a directory it does nothing."""

    def __init__(self, directory: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._events = EventLog.open(directory, "launcher", 0)
        self._clock = clock
        self._due_s = 0.0
        self._reader = None
        if directory is not None:
            from echelon.observe.resources import ResourceReader  # imports psutil, and looks for GPUs

            self._reader = ResourceReader()

    def tick(self) -> None:
        """Write an event if one is due."""
        now = self._clock()
        if self._reader is not None and now >= self._due_s:
            self._due_s = now + EVERY_S
            sample = asdict(self._reader.read())
            del sample["time"]
            self._events.write("resources", **sample)

    def close(self) -> None:
        """Write what is queued, and stop."""
        if self._reader is not None:
            self._reader.close()
        self._events.close()
