"""The transport across machines: everything is sent as frames over TCP."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

from echelon.transport.interface import Block, Endpoint
from echelon.transport.sockets import ClientSockets, ServerSockets


@dataclass(slots=True)
class PrivateBlock:
    """Memory that no peer can attach. It is mapped, so that its pages cost nothing until they are used."""

    buffer: memoryview
    descriptor: str = ""


def private_memory(num_bytes: int) -> memoryview:
    """Return zeroed memory of this process. A mapping needs at least one byte, so length 0 is a slice of one."""
    return memoryview(mmap.mmap(-1, max(1, num_bytes)))[:num_bytes]


class TcpTransport:
    """Sends everything as frames."""

    name = "tcp"

    def serve(self, host: str) -> Endpoint:
        """Return a server's endpoint."""
        return ServerSockets(host)

    def connect(self, name: str, addresses: Sequence[str]) -> Endpoint:
        """Return a client's endpoint."""
        return ClientSockets(name, addresses)

    def allocate(self, num_bytes: int) -> Block:
        """Return zeroed private memory."""
        return PrivateBlock(private_memory(num_bytes))

    def attach(self, descriptor: str) -> memoryview | None:
        """Return None: private memory cannot be attached."""
        return None
