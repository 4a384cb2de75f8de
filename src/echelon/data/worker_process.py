"""A process of the loader, seen from the loader: `worker` is what runs in it.

Threads decode side by side, but every image goes back and forth through the interpreter's lock a dozen times, and
handing that from one core to another takes longer than what is done under it: two threads make 1.2 times the images of
one, sixteen make fewer than one (docs/decisions/0011). Processes have a lock each. Pixels go through memory that both
sides map; a message of a few hundred bytes says what to make, and one comes back with the labels.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, Pipe

from echelon.data.chunks import Made
from echelon.data.worker import Chunk
from echelon.errors import DataError

_END_S = 30.0


class WorkerProcess:
    """One process. For one thread at a time."""

    def __init__(self) -> None:
        """Start it; it needs an order before it can make anything."""
        self._connection, theirs = Pipe()
        paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with theirs, _signals_blocked():
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "echelon.data.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **paths, "OMP_NUM_THREADS": "1"},
            )
        self.close = weakref.finalize(self, _end, self._process, self._connection)

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def begin(self, order: bytes) -> bool:
        """Give it a pickled Order; whether it can do that: it must be able to attach this process's memory."""
        try:
            self._connection.send_bytes(order)
            able: bool = self._connection.recv()
        except (EOFError, OSError):
            raise self._lost("before its first image") from None
        return able

    def make(self, chunk: Chunk) -> list[Made]:
        """Have a chunk made, and wait for it."""
        try:
            self._connection.send(chunk)
            made: list[Made] = self._connection.recv()
        except (EOFError, OSError):
            raise self._lost(f"at one of the samples {', '.join(map(str, chunk.records))}") from None
        return made

    def _lost(self, where: str) -> DataError:
        self._connection.close()
        status = self._process.wait(_END_S)
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        return DataError(f"a process that decodes images (pid {self.pid}) ended {how} {where}; is there enough memory?")


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """What is started inside never gets the signals that stop a whole job: the loader decides when it ends."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(process: subprocess.Popen[bytes], connection: Connection) -> None:
    """Without its connection it ends as soon as its chunk is done."""
    connection.close()
    process.wait(_END_S)
