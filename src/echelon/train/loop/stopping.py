"""How a run is stopped from outside: SIGTERM and Ctrl-C are recorded, and the loop checks for them after every step.

Validation and compiling have nothing to save, so a signal ends them at once.

The signal often goes to the whole process group and also ends processes that a step needs, such as a compiler or a
decoder. An error that such a step raises is not shown; the run stops as requested.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_STATUS = {number.name: 128 + number for number in (signal.SIGINT, signal.SIGTERM)}  # by the name of the signal


class Interrupted(BaseException):
    """A signal arrived and the current step did not finish: weights and optimizer may be out of step.

    Like KeyboardInterrupt it is not an Exception, so that no handler on the way resumes the step.
    """


class StopSignals:
    """Records whether a signal requested the end of the run: `requested` is its name."""

    def __init__(self) -> None:
        self.requested: str | None = None
        self._at_once = False

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record SIGTERM and Ctrl-C instead of raising inside this context; a second Ctrl-C raises at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._record) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def instead_of_errors(self) -> Iterator[None]:
        """Turn errors that follow a signal into `Interrupted` inside this context."""
        try:
            yield
        except Exception as error:
            if self.requested is None:
                raise
            raise Interrupted(self.requested) from error

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Raise `Interrupted` immediately on a signal inside this context, and at its start after an earlier signal.

        For long work with nothing to save: compiling a step, or a batch of validation.
        """
        self._at_once = True
        try:
            if self.requested is not None:
                raise Interrupted(self.requested)
            yield
        finally:
            self._at_once = False

    def _record(self, number: int, frame: object) -> None:
        if self.requested is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = signal.Signals(number).name
        if self._at_once:
            self._at_once = False  # the exception may prevent `at_once` from doing so
            raise Interrupted(self.requested)
