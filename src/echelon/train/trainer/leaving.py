"""SIGTERM to a worker of a job with servers: it is announced to the scheduler while the worker goes on with its step.

The scheduler answers that this worker may leave, or stops all workers if all were told to end. Whoever runs the loop
checks for these answers between steps.

A signal handler interrupts the main thread anywhere, also where it holds a lock that an announcement needs. So the
handler only puts the announcement into a queue (`SimpleQueue.put` is reentrant), and a thread sends it.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Callable

SIGTERM = signal.SIGTERM.name


class Announcer:
    """Calls `announce` in a thread of its own, once for each `request`, which a signal handler may call."""

    def __init__(self, announce: Callable[[str], None]) -> None:
        self._announce = announce
        self._requests: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="echelon-leaving", daemon=True)
        self._thread.start()

    def request(self) -> None:
        """Announce that SIGTERM has told this worker to end."""
        self._requests.put(SIGTERM)

    def close(self) -> None:
        """End the thread."""
        self._requests.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (reason := self._requests.get()) is not None:  # no deadline: nobody waits for this thread before `close`
            self._announce(reason)


class SigtermHandler:
    """Turns SIGTERM into an announcement, from `install` to `close`.

    It leaves the handler of a program that has its own, and does nothing outside the main thread, which alone can set
    handlers. In a process that was forked later (a DataLoader's), SIGTERM acts as if there were no handler.
    """

    def __init__(self, announce: Callable[[str], None]) -> None:
        self._announce = announce
        self._announcer: Announcer | None = None
        self._pid = os.getpid()

    def install(self) -> None:
        """Handle SIGTERM from now on. Later calls do nothing."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        if self._announcer is None and in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._announcer = Announcer(self._announce)
            signal.signal(signal.SIGTERM, self._handle)

    def close(self) -> None:
        """Restore the default action, unless the program has set a handler meanwhile."""
        if self._announcer is not None:
            if signal.getsignal(signal.SIGTERM) == self._handle:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._announcer.close()
            self._announcer = None

    def _handle(self, number: int, frame: object) -> None:
        if os.getpid() != self._pid:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif self._announcer is not None:
            self._announcer.request()
