"""SIGTERM as an exception, so that what runs is cleaned up as after Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


@contextmanager
def raised_by_sigterm(error: type[BaseException]) -> Iterator[None]:
    """Inside, SIGTERM raises this; further ones are ignored. Does nothing outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: object) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)  # `timeout` sends it twice: cleaning up is not to be cut short
        raise error

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
