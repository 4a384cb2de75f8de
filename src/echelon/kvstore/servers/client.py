"""A worker's requests: sent without waiting, answered in any order, repeated if lost, never waited for in vain.

A request that is late is asked about: a server that never saw it gets it again, one that holds it says for whom, and
that sentence is what a stall report prints and what the error of a missed deadline ends with.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from echelon.cluster.messages import (
    Ask,
    Done,
    Failed,
    Malformed,
    Request,
    Response,
    Status,
    decode_response,
    encode,
)
from echelon.errors import JobError, UsageError
from echelon.kvstore.servers.session import Session
from echelon.observe.events import EventLog
from echelon.transport.interface import Buffer, Endpoint, Peer

ASK_AFTER_S = 2.0


@dataclass(slots=True, eq=False)
class Ticket:
    """A request under way."""

    id: int
    server: int
    frames: list[Buffer]
    places: Sequence[memoryview]  # where the answer's frames go
    sent_at: float
    response: Response | None = None
    told: bool = False  # its refusal was raised


@dataclass(slots=True, eq=False)
class _Stall:
    """A wait that is being watched."""

    began: float
    asked: float
    told: float
    text: str = ""
    tickets: Sequence[Ticket] = field(default=())


class Client:
    """Requests from one worker to all servers. Safe to use from several threads, one at a time inside."""

    def __init__(
        self, endpoint: Endpoint, session: Session, events: EventLog, stall_seconds: float, timeout_s: float
    ) -> None:
        self._endpoint = endpoint
        self._session = session
        self._events = events
        self._stall_seconds = stall_seconds
        self._timeout_s = timeout_s
        self._ids = itertools.count(1)
        self._open: dict[int, Ticket] = {}
        self._status: dict[int, str] = {}
        self._lock = threading.RLock()
        self.malformed = 0
        endpoint.placer = self._place

    def next_id(self) -> int:
        """A number for a request."""
        return next(self._ids)

    def send(
        self, server: int, request: Request, frames: Sequence[Buffer] = (), places: Sequence[memoryview] = ()
    ) -> Ticket:
        """Send a request; its frames must not change until it is answered. `places`: where the answer's frames go."""
        with self._lock:
            self._session.check_here()
            ticket = Ticket(request.id, server, [encode(request), *frames], places, time.monotonic())
            self._open[ticket.id] = ticket
            self._endpoint.send(server, ticket.frames)
        return ticket

    def wait(self, tickets: Sequence[Ticket]) -> None:
        """Until all are answered. Raises the first refusal at once, and JobError when the job breaks or time is up."""
        with self._lock:
            stall: _Stall | None = None
            while not self._refused(tickets) and any(ticket.response is None for ticket in tickets):
                self._session.check_here()
                self._session.check()
                received = self._endpoint.recv(ASK_AFTER_S / 2)
                if received is not None:
                    self._receive(*received)
                    continue
                now = time.monotonic()
                stall = stall or _Stall(now - ASK_AFTER_S / 2, now, 0.0, tickets=tickets)
                self._watch(stall, now)
            for ticket in self._refused(tickets):
                ticket.told = True
                assert isinstance(ticket.response, Failed)
                if ticket.response.not_in_view:
                    self._session.hear_why()
                raise UsageError(f"worker {self._session.rank}: {ticket.response.reason}")

    def call(self, server: int, request: Request, frames: Sequence[Buffer] = ()) -> Response:
        """Send and wait."""
        ticket = self.send(server, request, frames)
        self.wait([ticket])
        assert ticket.response is not None
        return ticket.response

    def ready(self, tickets: Sequence[Ticket]) -> bool:
        """Whether all are answered by now, without waiting."""
        with self._lock:
            while any(ticket.response is None for ticket in tickets):
                self._session.check_here()
                received = self._endpoint.recv(0)
                if received is None:
                    return False
                self._receive(*received)
        return True

    def close(self) -> None:
        """Let the endpoint go."""
        with self._lock:
            self._endpoint.close()

    def _refused(self, tickets: Sequence[Ticket]) -> list[Ticket]:
        """Those that a server refused and that nobody has heard of yet: an error is raised once."""
        return [ticket for ticket in tickets if isinstance(ticket.response, Failed) and not ticket.told]

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
            return  # the answer to a request that was repeated, for the second time
        if ticket.places and isinstance(response, Done):
            for place, frame in zip(ticket.places, frames[1:], strict=True):
                if frame is not place:
                    place[:] = frame
        elif len(frames) > 1:
            ticket.frames = list(frames[1:])
        ticket.response = response

    def _place(self, head: memoryview, sizes: list[int]) -> Sequence[memoryview] | None:
        """Weights go straight to where they live: the endpoint reads them into the ticket's places."""
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

    def _watch(self, stall: _Stall, now: float) -> None:
        late = [ticket for ticket in stall.tickets if ticket.response is None]
        if now - stall.asked >= ASK_AFTER_S:
            stall.asked = now
            for ticket in list(self._open.values()):  # what was lost may be a push that nobody waits for
                self._endpoint.send(ticket.server, [encode(Ask(self.next_id(), ticket.id))])
        waited = now - stall.began
        text = "; ".join(self._status[server] for server in sorted({t.server for t in late}) if server in self._status)
        if waited > self._stall_seconds and text and now - stall.told >= self._stall_seconds:
            stall.told = now
            line = f"worker {self._session.rank} has waited {waited:.1f} s: {text}"
            print(line, file=sys.stderr, flush=True)
            self._events.write("stall", seconds=round(waited, 3), waiting=text)
        if waited > self._timeout_s:
            servers = sorted({ticket.server for ticket in late})
            why = text or f"no answer from server {', '.join(map(str, servers))}"
            raise JobError(f"worker {self._session.rank}: no answer in {waited:.0f} s: {why}")
