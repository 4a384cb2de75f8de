"""How a run is stopped from outside: SIGTERM and Ctrl-C are noted, and the loop looks for them after every step.

The signal often goes to the whole process group, and ends what a step needs: a compiler, a process that decodes. What
such a step raises is no error to show, but the stop that was asked for.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

STOPS = {number.name: 128 + number for number in (signal.SIGINT, signal.SIGTERM)}  # why a run was stopped: its status


class Interrupted(BaseException):
    """A signal came, and the step under way was not finished: weights and optimizer may be of two minds about it.

    As KeyboardInterrupt, it is none of the errors that somebody on the way may try to go on after.
    """


class Stopping:
    """Whether a signal asked for the end."""

    def __init__(self) -> None:
        self.asked: str | None = None
        self._at_once = False

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Inside, SIGTERM and Ctrl-C are only noted; a second Ctrl-C ends at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def instead_of_errors(self) -> Iterator[None]:
        """Inside, what fails after a signal is `Interrupted`."""
        try:
            yield
        except Exception as error:
            if self.asked is None:
                raise
            raise Interrupted(self.asked) from error

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside, a signal does not wait for the step's end, which is long to come and has nothing to save."""
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False

    def _note(self, number: int, frame: object) -> None:
        if self.asked is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = signal.Signals(number).name
        if self._at_once:
            raise Interrupted(self.asked)
