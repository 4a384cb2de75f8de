"""Output of threads that stand for processes: each line is passed on with the name of the thread that printed it."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from echelon.launch.supervision.children import OnLine


class _State(threading.local):
    passing = False  # whether this thread is in `on_line`, which prints to the stream behind


_STATE = _State()


@contextmanager
def labelled_output(names: frozenset[str], on_line: OnLine) -> Iterator[None]:
    """Pass what the threads with these names print to `on_line(name, text)`. Other threads print as before."""
    before = sys.stdout, sys.stderr
    streams = [LinesOfThreads(stream, names, on_line) for stream in before]
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in streams:
            stream.pass_on_rest()


class LinesOfThreads(io.TextIOBase):
    """A text stream in place of sys.stdout or sys.stderr.

    The beginning of a line that is flushed, such as the prompt of a debugger, is written at once.
    """

    def __init__(self, stream: TextIO, names: frozenset[str], on_line: OnLine) -> None:
        self._stream = stream
        self._names = names
        self._on_line = on_line
        self._lock = threading.RLock()
        self._partial = dict.fromkeys(names, "")  # the beginning of a line whose end was not printed yet
        self._prompted: set[str] = set()  # threads whose line was begun on the stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the stream behind."""
        return self._stream.encoding

    def isatty(self) -> bool:
        """Return False: labelled lines are for reading, not for cursor movements."""
        return False

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, text: str) -> int:
        """Pass on the whole lines of this thread and keep the rest."""
        name = threading.current_thread().name
        if _STATE.passing or name not in self._names:
            return self._stream.write(text)
        with self._lock:
            *whole, self._partial[name] = (self._partial[name] + text).split("\n")
            for line in whole:
                if name in self._prompted:
                    self._prompted.discard(name)
                    self._stream.write(f"{line}\n")
                else:
                    self._pass_on(name, line)
        return len(text)

    def flush(self) -> None:
        """Write the beginning of this thread's line."""
        name = threading.current_thread().name
        with self._lock:
            if not _STATE.passing and (begun := self._partial.get(name)):
                label = "" if name in self._prompted else f"[{name}] "
                self._prompted.add(name)
                self._partial[name] = ""
                self._stream.write(f"{label}{begun}")
            self._stream.flush()

    def pass_on_rest(self) -> None:
        """Pass on lines that have no end, when the threads have ended."""
        for name, text in self._partial.items():
            if text:
                self._pass_on(name, text)
        self._partial = dict.fromkeys(self._names, "")

    def _pass_on(self, name: str, line: str) -> None:
        _STATE.passing = True
        try:
            self._on_line(name, line)
        finally:
            _STATE.passing = False
