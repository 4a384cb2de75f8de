"""Byte streams between a launcher and an agent: the pipes of a program such as ssh, or this process's own pipes."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable
from typing import IO, Protocol

from echelon.launch.supervision.processes import READ_BYTES, ChildProcess

ENDING_S = 2.0  # for a program to exit after it has closed its output


class Stream(Protocol):
    """A connection in both directions. No method blocks."""

    def fileno(self) -> int:
        """Return what becomes readable when bytes have arrived."""
        ...

    def read(self) -> bytes | None:
        """Return bytes that have arrived, None if there are none, or b"" if the other side has ended."""
        ...

    def write(self, data: bytes) -> None:
        """Send bytes. What the kernel does not accept now is sent by later calls of `write` and `flush`."""
        ...

    def flush(self) -> None:
        """Send what is left of earlier calls of `write`."""
        ...

    @property
    def unsent(self) -> int:
        """How many bytes wait to be sent."""
        ...

    def why_ended(self) -> str:
        """Say why the other side has ended, after `read` has returned b""."""
        ...

    def close(self) -> None:
        """End the connection, and what this process started for it. A second call does nothing."""
        ...


class PipeStream:
    """A pipe to read from and a pipe to write to."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._unsent = bytearray()
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)

    def fileno(self) -> int:
        """Return the pipe to read from."""
        return self._reading

    def read(self) -> bytes | None:
        """Return bytes that have arrived, None if there are none, or b"" if the other side has ended."""
        try:
            return os.read(self._reading, READ_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def write(self, data: bytes) -> None:
        """Send bytes, or keep them for later."""
        self._unsent += data
        self.flush()

    def flush(self) -> None:
        """Send what is left. If the other side has ended, `read` says so."""
        try:
            while self._unsent:
                del self._unsent[: os.write(self._writing, self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()

    @property
    def unsent(self) -> int:
        """How many bytes wait to be sent."""
        return len(self._unsent)

    def why_ended(self) -> str:
        """Say why the other side has ended."""
        return "the other side closed the connection"

    def close(self) -> None:
        """Do nothing: the pipes belong to somebody else."""


class ProgramStream(PipeStream):
    """The standard input and output of a child process, such as ssh, that connects this process with an agent.

    `errors` is the file that receives the program's standard error. `explain(exit_code, errors)` says in one line why
    the program ended.
    """

    def __init__(self, program: ChildProcess, errors: IO[bytes], explain: Callable[[int, str], str]) -> None:
        assert program.stdin is not None
        assert program.stdout is not None
        super().__init__(program.stdout.fileno(), program.stdin.fileno())
        self._program, self._errors, self._explain = program, errors, explain
        self._closed = False

    def errors(self) -> str:
        """Return what the program has written to its standard error so far."""
        self._errors.flush()
        size = os.fstat(self._errors.fileno()).st_size
        return os.pread(self._errors.fileno(), size, 0).decode(errors="replace")

    def why_ended(self) -> str:
        """Say why the program ended, from its exit code and what it wrote to its standard error.

        A program may close its output before it exits.
        """
        select.select([self._program.pidfd], [], [], ENDING_S)
        return self._explain(self._program.reap(), self.errors())

    def close(self) -> None:
        """End the program."""
        if not self._closed:
            self._closed = True
            self._program.send_signal(signal.SIGTERM)
            self._program.close()
            self._errors.close()
