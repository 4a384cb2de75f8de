"""A wrapper around any transport that loses, repeats, delays and reorders chosen messages, for tests.

`choose.transport_of` wraps the transport of a process that has faults (ECHELON_FAULTS). Tests of a job in one process
wrap the transport themselves. The points of an endpoint:

| point | a fault there changes |
|---|---|
| send.KIND | an outgoing message of this kind: a worker's request, a server's response |
| receive.KIND | an incoming message |
| answer.REQUEST | a worker's incoming answer to a request of this kind |
| wait.REQUEST | nothing: reached when a worker's `recv` returns while such a request is open |

The clock of a point counts steps: a pull has the clock of the push before it. A partition or a slow link of the process
(`Faults.is_cut`, `Faults.sending_s`) concerns all messages of all its endpoints.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from echelon.cluster.messages import Done, Malformed, Request, Response, decode_request, decode_response
from echelon.faults import MESSAGE_KINDS, Fault, Faults, Kind
from echelon.transport.interface import CONNECT_S, Buffer, Endpoint, Peer, Placer, Traffic, Transport
from echelon.transport.outbox import Precedence

REORDER_S = 0.5  # a message that no other one follows arrives after this time
_Message = Request | Response


class FaultyTransport:
    """A transport whose messages have faults; everything else is passed to the inner transport."""

    def __init__(self, inner: Transport, faults: Faults, *, framed: bool = False) -> None:
        """`framed`: no memory is shared, so that tensors travel in the messages."""
        self.name = inner.name
        self.allocate = inner.allocate
        self.attach: Callable[[str], memoryview | None] = (lambda descriptor: None) if framed else inner.attach
        self.faults = faults
        self.version = 0  # of the last answer
        self._inner = inner

    @property
    def fired(self) -> list[Fault]:
        """The faults that have fired."""
        return self.faults.fired

    def serve(self, host: str) -> Endpoint:
        """Return a server's endpoint."""
        return FaultyEndpoint(self, self._inner.serve(host), "server", self.faults.rank, is_client=False)

    def connect(self, name: str, addresses: Sequence[str], wait_s: float = CONNECT_S) -> Endpoint:
        """Return the endpoint of a worker, or of a server that is the client of another one."""
        role, rank = _place(name)
        return FaultyEndpoint(self, self._inner.connect(name, addresses, wait_s), role, rank, is_client=True)


class FaultyEndpoint:
    """An endpoint that changes messages on their way out and in. Used by one thread, like any endpoint."""

    def __init__(
        self, transport: FaultyTransport, inner: Endpoint, role: str, rank: int | None, *, is_client: bool
    ) -> None:
        self.inner = inner
        self._transport = transport
        self._faults = transport.faults
        self._role, self._rank = role, rank
        self._is_client = is_client
        self._open: dict[int, tuple[str, int | None]] = {}  # a client's requests: id -> kind and clock
        self._replays: dict[str, tuple[Peer, list[bytes]]] = {}  # by kind
        self._held: list[tuple[float, Peer, Sequence[Buffer], bool]] = []  # due at, and whether a later one goes first
        self._again: list[tuple[Peer, list[memoryview]]] = []
        self.traffic: Traffic = inner.traffic
        self.broken = inner.broken
        self.wake = inner.wake
        self.disconnect = inner.disconnect
        self.redirect = inner.redirect
        self.close = inner.close

    @property
    def address(self) -> str:
        """The address of the inner endpoint."""
        return self.inner.address

    @property
    def placer(self) -> Placer | None:
        """Where the inner endpoint stores frames."""
        return self.inner.placer

    @placer.setter
    def placer(self, placer: Placer | None) -> None:
        self.inner.placer = placer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)  # what only some endpoints have

    def send(self, peer: Peer, frames: Sequence[Buffer], precedence: Precedence | None = None) -> None:
        """Send a message, unless a fault loses or holds it."""
        message = self._decode(memoryview(frames[0]), is_own=True)
        kind, clock = type(message).__name__, _clock(message)
        if self._is_client and message is not None:
            self._open[message.id] = kind, clock
        fault = self._take(f"send.{kind}", clock, MESSAGE_KINDS)
        if (fault and fault.kind == Kind.DROP) or self._faults.is_cut(self._name(peer)):
            return
        if fault and fault.kind in (Kind.DELAY, Kind.REORDER):
            reorders = fault.kind == Kind.REORDER
            due_at = time.monotonic() + (fault.seconds or REORDER_S if reorders else fault.seconds)
            self._held.append((due_at, peer, frames, reorders))
            return
        time.sleep(self._faults.sending_s(sum(memoryview(frame).nbytes for frame in frames)))
        self.inner.send(peer, frames, precedence)
        self._send_held(peer)
        if replayed := self._replays.pop(kind, None):
            self.inner.send(*replayed)
        if fault and fault.kind == Kind.DUPLICATE:
            self.inner.send(peer, frames)
        elif fault and fault.kind == Kind.REPLAY:
            self._replays[kind] = peer, [bytes(frame) for frame in frames]
        elif fault and fault.kind == Kind.CUT:
            self.inner.disconnect(peer)

    def recv(self, timeout_s: float) -> tuple[Peer, list[memoryview]] | None:
        """Return the next message that no fault loses, or None."""
        if self._again:
            return self._again.pop()
        while True:
            self._send_held()
            next_s = min((due_at for due_at, *_ in self._held), default=float("inf")) - time.monotonic()
            received = self.inner.recv(max(0.0, min(timeout_s, next_s)))
            for kind, clock in list(self._open.values()):
                self._faults.reach(f"wait.{kind}", clock)
            if received is None:
                return None
            if not self._faults.is_cut(self._name(received[0])):
                fault = self._arrived(received[1][0])
                if fault and fault.kind == Kind.DUPLICATE:
                    self._again.append(received)
                if not fault or fault.kind != Kind.DROP:
                    return received

    def _arrived(self, head: memoryview) -> Fault | None:
        """Return the fault of an incoming message."""
        message = self._decode(head, is_own=False)
        if message is None:
            return None
        if isinstance(message, Done):
            self._transport.version = message.version
        kind, clock = self._open.get(message.id, ("", _clock(message)))
        points = [f"receive.{type(message).__name__}", *([f"answer.{kind}"] if kind else [])]
        taken = (self._take(point, clock, (Kind.DROP, Kind.DUPLICATE)) for point in points)
        fault = next((fault for fault in taken if fault is not None), None)
        if fault is None or fault.kind != Kind.DROP:
            self._open.pop(message.id, None)
        return fault

    def _send_held(self, passed_by: Peer | None = None) -> None:
        """Send the messages that are due, and those that wait for a later message to the same peer."""
        now = time.monotonic()
        for one in list(self._held):
            due_at, peer, frames, reorders = one
            if due_at <= now or (reorders and peer == passed_by):
                self._held.remove(one)
                self.inner.send(peer, frames)

    def _take(self, point: str, clock: int | None, kinds: Sequence[Kind]) -> Fault | None:
        return self._faults.take(point, clock, kinds, role=self._role, rank=self._rank)

    def _decode(self, head: memoryview, *, is_own: bool) -> _Message | None:
        """Return a message, or None if it is malformed. Clients send requests, servers responses."""
        decode: Callable[[memoryview], _Message] = decode_request if self._is_client == is_own else decode_response
        try:
            return decode(head)
        except Malformed:
            return None

    def _name(self, peer: Peer) -> str:
        if isinstance(peer, int):
            return f"server {peer}"
        role, rank = _place(peer.decode(errors="replace"))
        return f"{role} {rank}"


def _place(name: str) -> tuple[str, int]:
    """Return the role and the rank in the name of an endpoint, such as "worker-3.0f4a…"."""
    role, _, rank = name.partition(".")[0].partition("-")
    return role, int(rank)


def _clock(message: Any) -> int | None:
    clock: int | None = getattr(message, "clock", None)
    return clock - 1 if clock is not None and type(message).__name__ == "Pull" else clock
