"""What a transport is: an endpoint that carries messages (a list of frames), and memory that a peer may look into.

A message arrives whole, once, and in order from each sender. Peers are named by the endpoint: a client's peers are
the servers' ranks, a server's peers are whatever bytes the client's endpoint calls itself. `recv` takes a deadline
and can be woken from another thread; nothing else of an endpoint is for two threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

Buffer = bytes | bytearray | memoryview
Peer = int | bytes
Placer = Callable[[memoryview, list[int]], Sequence[memoryview] | None]


class Endpoint(Protocol):
    """One process's end.

    `placer(first frame, sizes of the others)` may give the memory that the other frames of an incoming message go to,
    or None; an endpoint may ignore it. Frames that were placed are those very memoryviews.
    """

    placer: Placer | None

    @property
    def address(self) -> str:
        """Where clients connect; empty on a client."""
        ...

    def send(self, peer: Peer, frames: Sequence[Buffer]) -> None:
        """Send frames as one message. Buffers must stay unchanged until the peer has answered."""
        ...

    def recv(self, timeout_s: float) -> tuple[Peer, list[memoryview]] | None:
        """The next message, its frames as bytes, or None when the time is up or `wake` was called."""
        ...

    def wake(self) -> None:
        """Make a `recv` in another thread return at once; if none waits now, the next one does."""
        ...

    def close(self) -> None:
        """Let go of sockets and buffers."""
        ...


class Block(Protocol):
    """Memory of this process; `descriptor` lets a peer attach it, empty if no peer can."""

    buffer: memoryview
    descriptor: str


class Transport(Protocol):
    """How endpoints and memory are made."""

    name: str

    def serve(self, host: str) -> Endpoint:
        """A server's endpoint, reachable at `host`."""
        ...

    def connect(self, name: str, addresses: Sequence[str]) -> Endpoint:
        """A client's endpoint to all servers; peer i is the server at addresses[i]."""
        ...

    def allocate(self, num_bytes: int) -> Block:
        """Zeroed memory that peers may attach if the transport can."""
        ...

    def attach(self, descriptor: str) -> memoryview | None:
        """A peer's memory, or None if it is out of reach (another machine, another user): use frames."""
        ...
