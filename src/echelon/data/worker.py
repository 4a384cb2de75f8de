"""The loader's processes: they make chunks of samples in memory that they share with the loader, until it lets go.

    python -m echelon.data.worker FD

is the process that forks them (see `nursery`); FD is its end of a socket. When the loader is gone, connections end, and
so do all of these.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections import OrderedDict
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from echelon.data.chunks import Maker, Recipe
from echelon.transport.shared_memory import SharedMemoryTransport


class Order(NamedTuple):
    """The first message: what to make, and in what kind of memory, of which there are so many pieces at a time."""

    recipe: Recipe
    shape: tuple[int, ...]
    dtype: str
    num_batches: int
    sample: str  # the descriptor of such memory, to try whether it can be attached


class Chunk(NamedTuple):
    """A later message: samples of a batch, from place `start` on, and the descriptor of its memory."""

    records: list[int]
    draws: list[list[float]]
    descriptor: str
    start: int


class _Batches:
    """The memory of batches, by descriptor; what has not been asked for lately is let go."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._transport = SharedMemoryTransport()
        self._attached: OrderedDict[str, NDArray[Any]] = OrderedDict()

    def find(self, descriptor: str) -> NDArray[Any] | None:
        if descriptor not in self._attached:
            memory = self._transport.attach(descriptor)
            if memory is None:
                return None
            self._attached[descriptor] = np.frombuffer(memory, self._order.dtype).reshape(self._order.shape)
        self._attached.move_to_end(descriptor)
        if len(self._attached) > self._order.num_batches:
            self._attached.popitem(last=False)
        return self._attached[descriptor]


def serve(connection: Connection) -> NoReturn:
    """Answer the order with whether it can be done, and then chunks with what came out of them."""
    order: Order = connection.recv()
    batches = _Batches(order)
    connection.send(batches.find(order.sample) is not None)
    maker = Maker(order.recipe)
    while True:
        chunk: Chunk = connection.recv()
        images = batches.find(chunk.descriptor)
        assert images is not None, "memory that cannot be attached, though the first could"
        places = images[chunk.start : chunk.start + len(chunk.records)]
        connection.send(maker.make(chunk.records, chunk.draws, places))


def nurse(control: socket.socket) -> None:
    """Fork a process for every connection that comes, and say how it ended to who asks, until nobody can ask."""
    while True:
        word, files, _, _ = socket.recv_fds(control, 64, 1)
        if not word:
            return
        if files:
            answer = _fork(files[0], control, with_torch=word == b"torch")
        else:
            answer = os.waitstatus_to_exitcode(os.waitpid(int(word), 0)[1])
        control.send(str(answer).encode())


def _fork(file: int, control: socket.socket, *, with_torch: bool) -> int:
    if with_torch:
        import torch  # noqa: F401  # once, for all that are forked from now on
    pid = os.fork()
    if not pid:
        control.close()
        _live(Connection(file))
    os.close(file)
    return pid


def _live(connection: Connection) -> NoReturn:
    """The life of a forked process."""
    status = 1
    try:
        serve(connection)
    except (EOFError, ConnectionError):
        status = 0
    except BaseException:
        traceback.print_exc()
    os._exit(status)


if __name__ == "__main__":
    nurse(socket.socket(fileno=int(sys.argv[1])))
