"""A worker's requests to the servers: sent without waiting, answered in any order, sent again if they were lost.

If an answer is late, the client asks the server about the request. A server that never received it gets it again. A
server that holds it answers whom it waits for; stall reports and the error at the deadline contain that answer.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from echelon.cluster.messages import (
    Ask,
    Done,
    Failed,
    Malformed,
    Pull,
    Push,
    Request,
    Response,
    Status,
    decode_response,
    encode,
)
from echelon.errors import JobError, UsageError
from echelon.kvstore.servers.store_session import StoreSession
from echelon.observe.events import EventLog
from echelon.transport.interface import Buffer, Endpoint, Peer, Traffic
from echelon.transport.outbox import Precedence

ASK_AFTER_S = 2.0


@dataclass(slots=True, eq=False)
class Ticket:
    """A request and, once it has come, its answer."""

    id: int
    server: int
    frames: list[Buffer]
    places: Sequence[memoryview]  # memory for the frames of the answer
    response: Response | None = None
    raised: bool = False  # whether the server's refusal was raised as an error


@dataclass(slots=True, eq=False)
class _Stall:
    """A wait that takes long."""

    tickets: Sequence[Ticket]
    began_at: float
    asked_at: float
    reported_at: float = 0.0


class Client:
    """Sends requests to all servers and waits for answers. Thread-safe: a lock admits one thread at a time."""

    def __init__(
        self, endpoint: Endpoint, session: StoreSession, events: EventLog, stall_seconds: float, timeout_s: float
    ) -> None:
        self._endpoint = endpoint
        self._session = session
        self._events = events
        self.stall_seconds = stall_seconds
        self._timeout_s = timeout_s
        self._ids = itertools.count(1)
        self._open: dict[int, Ticket] = {}
        self._status: dict[int, str] = {}
        self._lock = threading.RLock()
        self.malformed = 0
        endpoint.placer = self._place

    @property
    def traffic(self) -> Traffic:
        """The bytes sent and received over sockets."""
        return self._endpoint.traffic

    def next_id(self) -> int:
        """Return a new request number."""
        return next(self._ids)

    def send(
        self, server: int, request: Request, frames: Sequence[Buffer] = (), places: Sequence[memoryview] = ()
    ) -> Ticket:
        """Send a request. Its frames must not change until it is answered; the answer's frames go to `places`."""
        with self._lock:
            self._session.check_joined()
            ticket = Ticket(request.id, server, [encode(request), *frames], places)
            self._open[ticket.id] = ticket
            precedence = Precedence(request.priority, request.keys) if isinstance(request, Push | Pull) else None
            self._endpoint.send(server, ticket.frames, precedence)
        return ticket

    def wait(self, tickets: Sequence[Ticket]) -> None:
        """Wait until all are answered.

        Raise UsageError as soon as a server refuses one, and JobError if the job fails or at the deadline.
        """
        with self._lock:
            stall: _Stall | None = None
            while not self._refused(tickets) and any(ticket.response is None for ticket in tickets):
                self._session.check_joined()
                self._session.check_job()
                received = self._endpoint.recv(ASK_AFTER_S / 2)
                if received is not None:
                    self._receive(*received)
                    continue
                now = time.monotonic()
                stall = stall or _Stall(tickets, began_at=now - ASK_AFTER_S / 2, asked_at=now)
                self._handle_stall(stall, now)
            for ticket in self._refused(tickets):
                ticket.raised = True
                assert isinstance(ticket.response, Failed)
                if ticket.response.not_in_view:
                    self._session.check_removed()
                raise UsageError(f"worker {self._session.rank}: {ticket.response.reason}")

    def call(self, server: int, request: Request, frames: Sequence[Buffer] = ()) -> Response:
        """Send a request, wait, and return the answer."""
        ticket = self.send(server, request, frames)
        self.wait([ticket])
        assert ticket.response is not None
        return ticket.response

    def ready(self, tickets: Sequence[Ticket]) -> bool:
        """Return whether all are answered, without waiting."""
        with self._lock:
            while any(ticket.response is None for ticket in tickets):
                self._session.check_joined()
                received = self._endpoint.recv(0)
                if received is None:
                    return False
                self._receive(*received)
        return True

    def close(self) -> None:
        """Close the endpoint."""
        with self._lock:
            self._endpoint.close()

    def _refused(self, tickets: Sequence[Ticket]) -> list[Ticket]:
        """Return those that a server refused and whose error was not raised yet: an error is raised once."""
        return [ticket for ticket in tickets if isinstance(ticket.response, Failed) and not ticket.raised]

    def _receive(self, peer: Peer, frames: list[memoryview]) -> None:
        try:
            response = decode_response(frames[0])
        except (Malformed, IndexError) as error:
            self.malformed += 1
            self._events.write("malformed", reason=str(error), count=self.malformed)
            return
        if isinstance(response, Status):
            self._take_status(response)
            return
        ticket = self._open.pop(response.id, None)
        if ticket is None:
            return  # the second answer to a request that was sent twice
        if ticket.places and isinstance(response, Done):
            for place, frame in zip(ticket.places, frames[1:], strict=True):
                if frame is not place:
                    place[:] = frame
        elif len(frames) > 1:
            ticket.frames = list(frames[1:])
        ticket.response = response

    def _place(self, peer: Peer, head: memoryview, sizes: list[int]) -> Sequence[memoryview] | None:
        """Return where the endpoint stores the frames of an answer: weights need no copy then."""
        try:
            response = decode_response(head)
        except Malformed:
            return None
        ticket = self._open.get(response.id)
        return ticket.places if ticket is not None and isinstance(response, Done) else None

    def _take_status(self, status: Status) -> None:
        ticket = self._open.get(status.about)
        if ticket is None:
            return
        if status.known:
            self._status[ticket.server] = status.waiting
        else:
            self._events.write("resent", server=ticket.server, request=ticket.id)
            self._endpoint.send(ticket.server, ticket.frames)

    def _handle_stall(self, stall: _Stall, now: float) -> None:
        """Ask the servers about open requests, report what they wait for, and raise JobError at the deadline."""
        if now - stall.asked_at >= ASK_AFTER_S:
            stall.asked_at = now
            for ticket in list(self._open.values()):  # the lost request may be a push that nobody waits for
                self._endpoint.send(ticket.server, [encode(Ask(self.next_id(), ticket.id))])
        waited = now - stall.began_at
        servers = sorted({ticket.server for ticket in stall.tickets if ticket.response is None})
        text = "; ".join(self._status[server] for server in servers if server in self._status)
        if waited > self.stall_seconds and text and now - stall.reported_at >= self.stall_seconds:
            stall.reported_at = now
            print(f"worker {self._session.rank} has waited {waited:.1f} s: {text}", file=sys.stderr, flush=True)
            self._events.write("stall", seconds=round(waited, 3), waiting=text)
        if waited > self._timeout_s:
            why = text or f"no answer from server {', '.join(map(str, servers))}"
            raise JobError(f"worker {self._session.rank}: no answer in {waited:.0f} s: {why}")
