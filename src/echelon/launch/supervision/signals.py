"""Signals that stop a job, collected for a loop that handles them."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def collected_signals() -> Iterator[deque[int]]:
    """Collect SIGINT and SIGTERM, the oldest first, instead of ending this process."""
    signals: deque[int] = deque()

    def collect(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    before = {number: signal.signal(number, collect) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
