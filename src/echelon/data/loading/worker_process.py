"""A process of the loader, seen from the loader: `worker` is what runs in it.

Threads decode side by side, but every image goes back and forth through the interpreter's lock a dozen times, and
handing that from one core to another takes longer than what is done under it: two threads make 1.2 times the images of
one, sixteen make fewer than one (docs/decisions/0011). Processes have a lock each. Pixels go through memory that both
sides map; a message of a few hundred bytes says what to make, and one comes back with the labels.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import weakref
from multiprocessing.connection import Connection

from echelon.data.loading.chunks import Made
from echelon.data.loading.decode_process import Chunk
from echelon.data.loading.fork_server import Nursery, nursery, shut
from echelon.errors import DataError

log = logging.getLogger(__name__)

SLOW_S = 30.0
_HINTS = {-signal.SIGBUS: "did the file change while it was read?", -signal.SIGKILL: "is there enough memory?"}


class WorkerProcess:
    """One process. For one thread at a time, but any may close it."""

    def __init__(self, *, with_torch: bool) -> None:
        """Start it; it needs an order before it can make anything."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._nursery, self.pid = _forked(theirs, with_torch)
        self._connection = Connection(os.dup(ours.fileno()))
        self.close = weakref.finalize(self, _end, os.getpid(), self._nursery, self.pid, ours)

    def begin(self, order: bytes) -> bool:
        """Give it a pickled Order; whether it can do that: it must be able to attach this process's memory."""
        try:
            self._connection.send_bytes(order)
            answer: bool | str = self._connection.recv()
        except (EOFError, OSError):
            raise self._lost("before its first image") from None
        if isinstance(answer, str):
            raise DataError(answer)
        return answer

    def make(self, chunk: Chunk) -> list[Made]:
        """Have a chunk made, and wait for it."""
        try:
            self._connection.send(chunk)
            if not self._connection.poll(SLOW_S):
                log.warning(
                    "a process that decodes images (pid %d) has been at samples %s for %g s; training waits for it",
                    self.pid,
                    _listed(chunk),
                    SLOW_S,
                )
            made: list[Made] = self._connection.recv()
        except (EOFError, OSError):
            raise self._lost(f"at one of the samples {_listed(chunk)}") from None
        return made

    def _lost(self, where: str) -> DataError:
        status: int | None = self.close()
        how = "" if status is None else f" by signal {-status}" if status < 0 else f" with status {status}"
        hint = _HINTS.get(status or 0, "what it said is above, if it said anything")
        return DataError(f"a process that decodes images (pid {self.pid}) ended{how} {where}; {hint}")


def _listed(chunk: Chunk) -> str:
    return ", ".join(map(str, chunk.records))


def _forked(theirs: socket.socket, with_torch: bool) -> tuple[Nursery, int]:
    """A new process, and where it comes from. A nursery may have been killed since it was needed last."""
    first = nursery()
    try:
        return first, first.fork(theirs, with_torch=with_torch)
    except DataError:
        second = nursery()
        return second, second.fork(theirs, with_torch=with_torch)


def _end(owner: int, nursery: Nursery, pid: int, connection: socket.socket) -> int | None:
    """Without its connection it ends as soon as its chunk is done; returns its status."""
    if os.getpid() != owner:
        return None
    shut(connection)
    return nursery.end(pid)
