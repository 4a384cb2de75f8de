"""Across machines: everything travels as frames over TCP."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

from echelon.transport.interface import Block, Endpoint
from echelon.transport.sockets import ClientSockets, ServerSockets


@dataclass(slots=True)
class PrivateBlock:
    """Memory that no peer can attach. Mapped, not allocated: pages cost nothing until they are touched."""

    buffer: memoryview
    descriptor: str = ""


def private_memory(num_bytes: int) -> memoryview:
    """Zeroed memory of this process; nothing can be mapped with length 0, so that is cut from one byte."""
    return memoryview(mmap.mmap(-1, max(1, num_bytes)))[:num_bytes]


class TcpTransport:
    """Frames only."""

    name = "tcp"

    def serve(self, host: str) -> Endpoint:
        """A server's endpoint."""
        return ServerSockets(host)

    def connect(self, name: str, addresses: Sequence[str]) -> Endpoint:
        """A client's endpoint."""
        return ClientSockets(name, addresses)

    def allocate(self, num_bytes: int) -> Block:
        """Zeroed private memory."""
        return PrivateBlock(private_memory(num_bytes))

    def attach(self, descriptor: str) -> memoryview | None:
        """Never possible."""
        return None
