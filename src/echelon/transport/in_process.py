"""The transport within one process, whose threads are servers and workers. Frames are not copied."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable, Sequence

from echelon.transport.interface import Block, Buffer, Endpoint, Peer, Placer, Traffic, private_memory
from echelon.transport.outbox import Precedence

_Message = tuple[Peer, list[memoryview]] | None


class _Endpoint:
    """An endpoint: a queue of received messages."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.placer: Placer | None = None  # ignored, because frames are not copied
        self.traffic = Traffic()  # stays 0: there are no sockets
        self.broken: set[Peer] = set()  # stays empty
        self.messages: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self.routes: dict[Peer, tuple[_Endpoint, Peer]] = {}  # peer -> (its endpoint, this endpoint's name there)
        self.reroute: Callable[[Peer, str], None] = lambda peer, address: None

    def send(self, peer: Peer, frames: Sequence[Buffer], precedence: Precedence | None = None) -> None:
        if peer not in self.routes:
            return  # it has closed
        endpoint, own_name = self.routes[peer]
        endpoint.messages.put((own_name, [memoryview(frame).cast("B") for frame in frames]))

    def recv(self, timeout_s: float) -> tuple[Peer, list[memoryview]] | None:
        try:
            return self.messages.get(timeout=timeout_s) if timeout_s > 0 else self.messages.get_nowait()
        except queue.Empty:
            return None

    def disconnect(self, peer: Peer) -> None:
        pass  # there is no stream of bytes whose messages could be out of step

    def redirect(self, peer: Peer, address: str) -> None:
        self.reroute(peer, address)

    def wake(self) -> None:
        self.messages.put(None)

    def close(self) -> None:
        self.routes.clear()


class InProcessTransport:
    """A network of its own: endpoints of different instances cannot connect to each other."""

    name = "in-process"

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._servers: dict[str, _Endpoint] = {}
        self._blocks: dict[str, memoryview] = {}

    def serve(self, host: str) -> Endpoint:
        """Return a server's endpoint."""
        endpoint = _Endpoint(f"in-process://{next(self._numbers)}")
        self._servers[endpoint.address] = endpoint
        return endpoint

    def connect(self, name: str, addresses: Sequence[str], wait_s: float = 0.0) -> Endpoint:
        """Return a client's endpoint."""
        client = _Endpoint("")
        number = next(self._numbers)

        def reroute(peer: Peer, address: str) -> None:
            server, own_name = self._servers[address], f"{name}.{number}.{peer!r}".encode()
            client.routes[peer] = (server, own_name)
            server.routes[own_name] = (client, peer)

        for index, address in enumerate(addresses):
            reroute(index, address)
        client.reroute = reroute
        return client

    def allocate(self, num_bytes: int) -> Block:
        """Return zeroed memory."""
        block = Block(private_memory(num_bytes), f"block-{next(self._numbers)}")
        self._blocks[block.descriptor] = block.buffer
        return block

    def attach(self, descriptor: str) -> memoryview | None:
        """Return the memory of a descriptor."""
        return self._blocks.get(descriptor)
