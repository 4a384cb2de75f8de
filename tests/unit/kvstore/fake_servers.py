"""Servers, session, event log and clock for unit tests of a worker's side: no process, no thread, no real time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from types import UnionType
from typing import Any

from echelon.cluster.messages import Ask, Attach, Done, Place, Placed, Request, Response, decode_request, encode
from echelon.cluster.placement import Layout
from echelon.errors import JobError, UsageError
from echelon.kvstore.servers.store_session import StoreSession
from echelon.observe.events import EventLog
from echelon.transport.interface import Buffer, Peer, Placer, Traffic
from echelon.transport.outbox import Precedence

Answer = Response | tuple[Response, list[bytes]]


class FakeSession(StoreSession):
    """Worker 0 of a job. Set an attribute to make the check of the same name fail."""

    def __init__(self) -> None:
        self.broken: str | None = None
        self.removed: str | None = None
        self.left = False
        self.addresses: list[str | None] = [f"tcp://host:{port}" for port in range(8)]

    @property
    def slice_addresses(self) -> list[str | None]:
        return self.addresses

    @property
    def rank(self) -> int:
        return 0

    def follow_slices(self) -> None:
        self.follow()

    def check_job(self) -> None:
        if self.broken:
            raise JobError(self.broken)

    def check_joined(self) -> None:
        if self.left:
            raise UsageError("this store is closed")

    def check_removed(self) -> None:
        if self.removed:
            raise JobError(self.removed)


class RecordingLog(EventLog):
    """Keeps events in a list."""

    def __init__(self) -> None:
        super().__init__(None, "worker", 0)
        self.events: list[tuple[str, dict[str, Any]]] = []

    def write(self, kind: str, **facts: Any) -> None:
        self.events.append((kind, facts))


class FakeServers:
    """The endpoint of a worker. Servers place keys, and answer other requests with `answer`, or not if it is None.

    Time passes only in `recv`, by the timeout of the call: use `now` in place of `time.monotonic`.
    """

    address = ""

    def __init__(self, num_servers: int = 1, answer: Callable[[int, Request], Answer | None] | None = None) -> None:
        self.placer: Placer | None = None
        self.traffic = Traffic()
        self.broken: set[Peer] = set()
        self.sent: list[tuple[int, Request, list[bytes]]] = []
        self.precedences: list[Precedence | None] = []  # of what was sent
        self.answer = answer or (lambda server, request: Done(request.id))
        self.layout = Layout(num_servers)
        self._received: deque[tuple[Peer, list[memoryview]]] = deque()
        self._time = 0.0

    def now(self) -> float:
        return self._time

    def requests(self, kind: type | UnionType) -> list[tuple[int, Any, list[bytes]]]:
        """Return what was sent of one kind: server, request, a copy of its frames."""
        return [one for one in self.sent if isinstance(one[1], kind)]

    def deliver(self, server: int, answer: Answer | bytes) -> None:
        """Let the worker receive an answer of a server; bytes are sent as they are."""
        response, frames = answer if isinstance(answer, tuple) else (answer, [])
        head = response if isinstance(response, bytes) else encode(response)
        self._received.append((server, [memoryview(frame) for frame in (head, *frames)]))

    def send(self, peer: Peer, frames: Sequence[Buffer], precedence: Precedence | None = None) -> None:
        assert isinstance(peer, int)
        request = decode_request(bytes(frames[0]))
        self.sent.append((peer, request, [bytes(frame) for frame in frames[1:]]))
        self.precedences.append(precedence)
        answer: Answer | None
        if isinstance(request, Place):
            slots = self.layout.place(request.specs)
            answer = Placed(request.id, self.layout.segments, slots)
        elif isinstance(request, Attach | Ask):
            answer = self.answer(peer, request) if isinstance(request, Attach) else None
        else:
            answer = self.answer(peer, request)
        if answer is not None:
            self.deliver(peer, answer)

    def recv(self, timeout_s: float) -> tuple[Peer, list[memoryview]] | None:
        if self._received:
            return self._received.popleft()
        self._time += timeout_s
        return None

    def disconnect(self, peer: Peer) -> None: ...

    def redirect(self, peer: Peer, address: str) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...
