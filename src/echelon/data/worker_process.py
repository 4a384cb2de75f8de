"""A process of the loader, seen from the loader: `worker` is what runs in it.

Threads decode side by side, but every image goes back and forth through the interpreter's lock a dozen times, and
handing that from one core to another takes longer than what is done under it: two threads make 1.2 times the images of
one, sixteen make fewer than one (docs/decisions/0011). Processes have a lock each. Pixels go through memory that both
sides map; a message of a few hundred bytes says what to make, and one comes back with the labels.
"""

from __future__ import annotations

import weakref
from multiprocessing.connection import Connection, Pipe

from echelon.data.chunks import Made
from echelon.data.nursery import Nursery, nursery
from echelon.data.worker import Chunk
from echelon.errors import DataError


class WorkerProcess:
    """One process. For one thread at a time."""

    def __init__(self, *, with_torch: bool) -> None:
        """Start it; it needs an order before it can make anything."""
        self._connection, theirs = Pipe()
        self._nursery = nursery()
        with theirs:
            self.pid = self._nursery.fork(theirs, with_torch=with_torch)
        self.close = weakref.finalize(self, _end, self._nursery, self.pid, self._connection)

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
        status = self._nursery.wait(self.pid)
        how = f"by signal {-status}" if status is not None and status < 0 else f"with status {status}"
        return DataError(f"a process that decodes images (pid {self.pid}) ended {how} {where}; is there enough memory?")


def _end(nursery: Nursery, pid: int, connection: Connection) -> None:
    """Without its connection it ends as soon as its chunk is done."""
    connection.close()
    nursery.wait(pid)
