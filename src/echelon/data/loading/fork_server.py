"""Where the loader's processes come from: a process that has imported what they need and forks when asked.

An import of torch takes two seconds of a core; this way all processes of all loaders have it for one. The nursery is a
program of its own (`worker`), not a fork of this process: that has threads, a GPU, and memory that forks would keep. It
lives as long as a loader holds a process of it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from echelon.errors import DataError

PATIENCE_S = 120.0  # an import of torch may take long on a busy machine
_WORD = 64  # bytes; all messages are shorter

# Its own packages first, then the standard library, then what this process has besides: nothing shadows a module.
_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[2]); sys.path += sys.argv[3:]; "
    "from echelon.data.loading.decode_process import main; main(int(sys.argv[1]))"
)

_lock = threading.Lock()
_shared: dict[int, weakref.ref[Nursery]] = {}  # by the process that has it: a fork of it needs another


class Nursery:
    """The other side of `worker.nurse`. Threads share it."""

    def __init__(self) -> None:
        self._talk = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(PATIENCE_S)
        folders = [str(Path(__file__).parents[3]), *(str(path) for path in sys.path if path)]
        with theirs, _signals_blocked():
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, str(theirs.fileno()), *folders],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self.pid = process.pid
        weakref.finalize(self, _end, os.getpid(), process, self._control)

    def fork(self, connection: socket.socket, *, with_torch: bool) -> int:
        """Start a process that serves the other end of this; returns its number."""
        try:
            return self._ask(b"torch" if with_torch else b"plain", [connection.fileno()])
        except (OSError, ValueError) as error:
            raise DataError(
                f"the process that starts others to decode images (pid {self.pid}) is gone: {error}"
            ) from None

    def end(self, pid: int) -> int | None:
        """See that a process ends, whose connection is shut; its status as subprocess has it, None if nobody knows."""
        try:
            return self._ask(str(pid).encode(), [])
        except (OSError, ValueError):
            return None

    @property
    def answers(self) -> bool:
        """Whether it can be asked."""
        return self._control.fileno() >= 0

    def _ask(self, word: bytes, files: list[int]) -> int:
        with self._talk:
            try:
                socket.send_fds(self._control, [word], files)
                return int(self._control.recv(_WORD))
            except BaseException:  # Ctrl-C, too: an answer that comes too late would be taken for the next one
                self._control.close()
                raise


def nursery() -> Nursery:
    """The one of this process, made where there is none."""
    with _lock:
        known = _shared.get(os.getpid(), lambda: None)()
        if known is None or not known.answers:
            known = Nursery()
            _shared[os.getpid()] = weakref.ref(known)
        return known


def shut(connection: socket.socket) -> None:
    """End a connection for the other side, though a fork of this process may hold it, too."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """What is started inside never gets the signals that stop a whole job: the loader decides when it ends."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(owner: int, process: subprocess.Popen[bytes], control: socket.socket) -> None:
    if os.getpid() == owner:
        shut(control)
        process.wait(PATIENCE_S)
