"""The interface of a transport: endpoints that carry messages (lists of frames), and memory that peers may attach.

A message arrives whole, once, and in order from each sender, unless its precedence lets it overtake others. A client's
peers are the ranks of the servers; a server's peers are the names of the clients' endpoints. `recv` has a timeout and
can be woken from another thread. Apart from `wake`, an endpoint is used by one thread only.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from echelon.errors import unknown_name
from echelon.transport.outbox import Precedence

CONNECT_S = 30.0
Buffer = bytes | bytearray | memoryview
Peer = int | bytes
Placer = Callable[[Peer, memoryview, list[int]], Sequence[memoryview] | None]


@dataclass(slots=True)
class Traffic:
    """The bytes that an endpoint has sent and received over sockets, and of these the ones that wait."""

    sent: int = 0
    received: int = 0
    queued: int = 0  # of messages that were received, and that `recv` has not returned yet


class FramesRefused(Exception):
    """Raised by a placer: these frames must not be received. The endpoint ends the connection."""


class FramesDeferred(Exception):
    """Raised by a placer: there is no room for these frames now. A server's endpoint reads the others, and asks again.

    Each call of `recv` asks again, so the connection goes on when there is room. Nothing is lost meanwhile: the bytes
    wait in the sockets and in the memory of the sender.
    """


class Endpoint(Protocol):
    """One process's end of its connections.

    `placer(peer, first_frame, sizes)` may return the memory for the other frames of an incoming message, whose sizes
    are given, or None, or raise FramesRefused or FramesDeferred. An endpoint that does not copy frames ignores it. If
    the memory fits, the received frames are these same memoryviews.

    `broken` has the servers whose connection to this client ended, until the caller removes them; `recv` returns when
    one is added. What was sent over such a connection, and the answers, may be lost.
    """

    placer: Placer | None
    traffic: Traffic
    broken: set[Peer]

    @property
    def address(self) -> str:
        """The address that clients connect to; empty on a client."""
        ...

    def send(self, peer: Peer, frames: Sequence[Buffer], precedence: Precedence | None = None) -> None:
        """Send frames as one message. Buffers must stay unchanged until the peer has answered.

        If messages wait for the link, one with a `precedence` may overtake others (`outbox.py`).
        """
        ...

    def recv(self, timeout_s: float) -> tuple[Peer, list[memoryview]] | None:
        """Return the next message, or None when the time is up, `wake` was called, or `broken` has grown."""
        ...

    def disconnect(self, peer: Peer) -> None:
        """End the connection of a peer, whose messages cannot be trusted. It may connect again."""
        ...

    def redirect(self, peer: Peer, address: str) -> None:
        """Find a server at another address from now on; messages to the old one may be lost."""
        ...

    def wake(self) -> None:
        """Make a waiting `recv` return at once. If none is waiting, the next one returns at once."""
        ...

    def close(self) -> None:
        """Release sockets and buffers."""
        ...


@dataclass(slots=True, eq=False)
class Block:
    """Memory of this process. A peer attaches it by `descriptor`, which is empty if no peer can."""

    buffer: memoryview
    descriptor: str = ""


def private_memory(num_bytes: int) -> memoryview:
    """Return zeroed memory of this process. It is mapped, so that its pages cost nothing until they are used."""
    return memoryview(mmap.mmap(-1, max(1, num_bytes)))[:num_bytes]  # a mapping needs at least one byte


class Transport(Protocol):
    """Creates endpoints and memory."""

    name: str

    def serve(self, host: str) -> Endpoint:
        """Return a server's endpoint, reachable at `host`."""
        ...

    def connect(self, name: str, addresses: Sequence[str], wait_s: float = CONNECT_S) -> Endpoint:
        """Return a client's endpoint, connected to all servers. Peer i is the server at addresses[i].

        `wait_s`: how long to wait for servers that cannot be reached. 0: connect when a message is sent.
        """
        ...

    def allocate(self, num_bytes: int) -> Block:
        """Return zeroed memory, which peers may attach if the transport supports it."""
        ...

    def attach(self, descriptor: str) -> memoryview | None:
        """Return a peer's memory, or None if it cannot be reached (another machine or user). Then use frames."""
        ...


NAMES = ("auto", "shm", "tcp")


def check_name(name: str) -> None:
    """Raise UsageError for a name that is not a transport's."""
    if name not in NAMES:
        raise unknown_name("transport", name, NAMES)
