"""The loader's processes: they make chunks of samples in memory that they share with the loader, until it lets go.

`main` is the process that forks them (see `nursery`). When the loader is gone, connections end, and so do all of these.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import traceback
from collections import OrderedDict
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from echelon.data.loading.chunks import Maker, Recipe
from echelon.errors import DataError
from echelon.transport.shared_memory import SharedMemoryTransport

END_S = 5.0  # a chunk takes milliseconds: what is still there then is stuck


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


def serve(connection: Connection) -> None:
    """Answer the order with whether it can be done, or why not, and then chunks with what came out of them."""
    try:
        order: Order = connection.recv()
    except DataError as error:
        connection.send(str(error))
        return
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
    """Fork a process for every connection that comes, and see that it ends when that is asked, until nobody can ask."""
    while True:
        word, files, _, _ = socket.recv_fds(control, 64, 1)
        if not word:
            return
        answer = _fork(files[0], control, with_torch=word == b"torch") if files else _reap(int(word))
        control.send(str(answer).encode())


def _reap(pid: int) -> int:
    """Wait for a process, whose connection is shut, and end it if it does not end by itself. Returns its status."""
    watch = os.pidfd_open(pid)
    if not select.select([watch], [], [], END_S)[0]:
        os.kill(pid, signal.SIGKILL)
    os.close(watch)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


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
    status = 0
    try:
        with suppress(EOFError, ConnectionError):
            serve(connection)
    except BaseException:
        status = 1
        traceback.print_exc()
    os._exit(status)


def main(file: int) -> None:
    """Be the nursery of whoever has the other end of this socket."""
    with suppress(ConnectionError):
        nurse(socket.socket(fileno=file))
