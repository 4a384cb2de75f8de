"""Inside one process: scheduler, servers and workers as threads, for tests and debuggers. Frames are handed over."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Sequence
from dataclasses import dataclass

from echelon.transport.interface import Buffer, Endpoint, Peer, Placer
from echelon.transport.tcp import private_memory

_Mail = tuple[Peer, list[memoryview]] | None


class _Box:
    """An endpoint that is a queue."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.placer: Placer | None = None  # frames are handed over as they are
        self.mail: queue.SimpleQueue[_Mail] = queue.SimpleQueue()
        self.routes: dict[Peer, tuple[_Box, Peer]] = {}  # peer -> (its box, what it calls this box)

    def send(self, peer: Peer, frames: Sequence[Buffer]) -> None:
        box, own_name = self.routes[peer]
        box.mail.put((own_name, [memoryview(frame).cast("B") for frame in frames]))

    def recv(self, timeout_s: float) -> tuple[Peer, list[memoryview]] | None:
        try:
            return self.mail.get(timeout=timeout_s) if timeout_s > 0 else self.mail.get_nowait()
        except queue.Empty:
            return None

    def wake(self) -> None:
        self.mail.put(None)

    def close(self) -> None:
        self.routes.clear()


@dataclass(slots=True)
class LocalBlock:
    """Memory that any thread of this process can attach by its descriptor."""

    buffer: memoryview
    descriptor: str


class InProcessTransport:
    """One instance is one network: endpoints of different instances do not meet."""

    name = "in-process"

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._servers: dict[str, _Box] = {}
        self._blocks: dict[str, memoryview] = {}

    def serve(self, host: str) -> Endpoint:
        """A server's endpoint."""
        box = _Box(f"in-process://{next(self._numbers)}")
        self._servers[box.address] = box
        return box

    def connect(self, name: str, addresses: Sequence[str]) -> Endpoint:
        """A client's endpoint."""
        client = _Box("")
        own_name = f"{name}.{next(self._numbers)}".encode()
        for index, address in enumerate(addresses):
            server = self._servers[address]
            client.routes[index] = (server, own_name)
            server.routes[own_name] = (client, index)
        return client

    def allocate(self, num_bytes: int) -> LocalBlock:
        """Zeroed memory."""
        block = LocalBlock(private_memory(num_bytes), f"block-{next(self._numbers)}")
        self._blocks[block.descriptor] = block.buffer
        return block

    def attach(self, descriptor: str) -> memoryview | None:
        """The memory behind a descriptor."""
        return self._blocks.get(descriptor)
