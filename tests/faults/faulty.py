"""A wrapper around any transport that loses, repeats and delays chosen messages.

A fault is addressed by worker, kind of request and clock. It fires once, and `fired` records it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from echelon.cluster.messages import Done, Response, decode_request, decode_response
from echelon.transport.interface import Buffer, Endpoint, Peer, Placer, Traffic, Transport
from echelon.transport.outbox import Precedence

LOSE = "lose"  # the request never arrives
REPEAT = "repeat"  # it arrives twice
REPEAT_LATE = "repeat late"  # it arrives again after the worker's next request of that kind
LOSE_ANSWER = "lose answer"
REPEAT_ANSWER = "repeat answer"
WHILE_WAITING = "while waiting"  # the message is not changed; `on_fire` is called when its wait returns


@dataclass(frozen=True, slots=True)
class MessageFault:
    """A fault of a worker's request. `clock` counts steps: a pull has the clock of the push before it."""

    rank: int
    kind: str
    action: str
    clock: int | None = None


class FaultyTransport:
    """A transport with faults; everything else is passed to the inner transport."""

    def __init__(
        self,
        inner: Transport,
        faults: Sequence[MessageFault],
        *,
        on_fire: Callable[[MessageFault], None] = lambda fault: None,
        framed: bool = False,
    ) -> None:
        self.name = inner.name
        self.serve = inner.serve
        self.allocate = inner.allocate
        self.attach: Callable[[str], memoryview | None] = (lambda descriptor: None) if framed else inner.attach
        self.fired: list[MessageFault] = []
        self.version = 0  # of the last answer
        self._inner = inner
        self._left = list(faults)
        self._on_fire = on_fire

    def connect(self, name: str, addresses: Sequence[str]) -> Endpoint:
        """Return a worker's endpoint, to whose messages the faults apply."""
        return _FaultyEndpoint(
            self, self._inner.connect(name, addresses), int(name.removeprefix("worker-").partition(".")[0])
        )

    def take(self, rank: int, kind: str, clock: int | None, actions: Sequence[str]) -> str | None:
        """Return the action of a matching fault, and record that it fired."""
        for fault in self._left:
            if (fault.rank, fault.kind) == (rank, kind) and fault.clock in (None, clock) and fault.action in actions:
                self._left.remove(fault)
                self.fired.append(fault)
                self._on_fire(fault)
                return fault.action
        return None


class _FaultyEndpoint:
    def __init__(self, faults: FaultyTransport, inner: Endpoint, rank: int) -> None:
        self._faults = faults
        self._inner = inner
        self._rank = rank
        self._open: dict[int, tuple[str, int | None]] = {}  # request id -> kind and clock
        self._late: dict[str, tuple[Peer, list[bytes]]] = {}
        self._again: list[tuple[Peer, list[memoryview]]] = []
        self.placer: Placer | None = None  # not used: answers are copied to their places
        self.traffic = Traffic()
        self.address = inner.address
        self.disconnect = inner.disconnect
        self.wake = inner.wake
        self.close = inner.close

    def send(self, peer: Peer, frames: Sequence[Buffer], precedence: Precedence | None = None) -> None:
        request: Any = decode_request(memoryview(frames[0]))
        kind = type(request).__name__
        clock = request.clock - 1 if kind == "Pull" else getattr(request, "clock", None)
        self._open[request.id] = kind, clock
        action = self._faults.take(self._rank, kind, clock, (LOSE, REPEAT, REPEAT_LATE))
        if action == LOSE:
            return
        self._inner.send(peer, frames, precedence)
        if late := self._late.pop(kind, None):
            self._inner.send(*late)
        if action == REPEAT:
            self._inner.send(peer, frames)
        elif action == REPEAT_LATE:
            self._late[kind] = peer, [bytes(frame) for frame in frames]

    def recv(self, timeout_s: float) -> tuple[Peer, list[memoryview]] | None:
        if self._again:
            return self._again.pop()
        while True:
            received = self._inner.recv(timeout_s)
            for kind, clock in self._open.values():
                self._faults.take(self._rank, kind, clock, (WHILE_WAITING,))
            if received is None:
                return None
            response = decode_response(received[1][0])
            action = self._answered(response)
            if action == REPEAT_ANSWER:
                self._again.append(received)
            if action != LOSE_ANSWER:
                return received

    def _answered(self, response: Response) -> str | None:
        if isinstance(response, Done):
            self._faults.version = response.version
        kind, clock = self._open.get(response.id, ("", None))
        action = self._faults.take(self._rank, kind, clock, (LOSE_ANSWER, REPEAT_ANSWER))
        if action != LOSE_ANSWER:
            self._open.pop(response.id, None)
        return action
