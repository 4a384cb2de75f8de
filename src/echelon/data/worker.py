"""The loader's process: makes chunks of samples in memory that it shares with the loader, until that lets go of it.

    python -m echelon.data.worker FD

is how `worker_process` starts it; FD is its end of their connection. When the loader is gone, the connection ends, and
so does this.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

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


def serve(connection: Connection) -> None:
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


def main() -> None:
    """Serve whoever holds the other end."""
    try:
        serve(Connection(int(sys.argv[1])))
    except (EOFError, ConnectionError):
        pass


if __name__ == "__main__":
    main()
