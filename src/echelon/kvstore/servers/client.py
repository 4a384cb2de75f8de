"""A worker's requests to the servers: sent without waiting, answered in any order, sent again if they were lost.

If an answer is late, or the connection broke, the client asks the server about the request. A server that never
received it gets it again. A server that holds it answers whom it waits for; stall reports and the error at the deadline
contain that answer.
"""

from __future__ import annotations

import itertools
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from echelon.cluster.messages import (
    UNREAD,
    Ask,
    Contents,
    Done,
    Failed,
    Malformed,
    MeasureNorm,
    Pull,
    Push,
    Recovering,
    Request,
    Response,
    SquaredNorm,
    Status,
    decode_response,
    encode,
)
from echelon.errors import JobError, UsageError
from echelon.kvstore.servers.store_session import StoreSession
from echelon.observe.events import EventLog
from echelon.observe.history import WorkerHistory, is_recorded
from echelon.server.storage.write_log import WriteLog
from echelon.transport.interface import Buffer, Endpoint, Peer, Traffic
from echelon.transport.outbox import Precedence

ASK_AFTER_S = 2.0
SILENT_S = 3 * ASK_AFTER_S  # a server that has not answered for so long is reported
KNOWN_S = 10.0  # for which a worker that joins a running job may be unknown to a server
RETRY_S = 0.02
LOST_S = 0.5  # between two losses of a connection after which a server is asked at once about all requests
_MAX_ANSWERS = 4096
Rewritten = tuple[Request, Sequence[Buffer], Sequence[memoryview]]


@dataclass(slots=True, eq=False)
class Ticket:
    """A request and, once it has come, its answer."""

    request: Request
    server: int
    frames: list[Buffer]
    places: Sequence[memoryview]  # memory for the frames of the answer
    response: Response | None = None
    raised: bool = False  # whether the server's refusal was raised as an error

    @property
    def id(self) -> int:
        """The number of the request."""
        return self.request.id


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
        self._status: dict[int, str] = {}  # by server: what it waits for, as it said last
        self._heard_at: dict[Peer, float] = {}  # by server: when its last message came
        self._lost_at: dict[Peer, float] = {}  # by server: when it was asked because the connection broke
        self._lock = threading.RLock()
        self._addresses = session.slice_addresses
        self._greeting: Callable[[int], Request] | None = None  # the first request to the server of a slice
        self.on_moved: Callable[[int], None] = lambda server: None
        self.on_recovering: Callable[[int], None] = lambda server: None
        self.norms: dict[int, tuple[int, list[int], float]] = {}  # by server: the last one that it told this worker
        # By server and list of keys: the list, and what the weights of the last answer contain.
        self._contents: dict[tuple[int, int], tuple[list[int], list[Contents]]] = {}
        self._old_contents: dict[tuple[int, int], Contents] = {}  # by server and key: of answers before those
        self.malformed = 0
        self._history = WorkerHistory(events, session.number) if is_recorded(events) else None
        endpoint.placer = self._place
        session.follow = self.follow

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
            self._follow_slices()
            ticket = Ticket(request, server, [encode(request), *frames], places)
            self._open[ticket.id] = ticket
            precedence = Precedence(request.priority, request.keys) if isinstance(request, Push | Pull) else None
            self._endpoint.send(server, ticket.frames, precedence)
        return ticket

    def wait(self, tickets: Sequence[Ticket], patience_s: float = math.inf) -> bool:
        """Wait until all are answered, and return True; or False, when no answer of any kind came for `patience_s`.

        Raise UsageError as soon as a server refuses one, and JobError if the job fails or at the deadline.
        """
        with self._lock:
            stall: _Stall | None = None
            received_at = time.monotonic()
            while not self._refused(tickets) and any(ticket.response is None for ticket in tickets):
                self._session.check_joined()
                self._session.check_job()
                self._follow_slices()
                received = self._recv(min(ASK_AFTER_S / 2, patience_s))
                now = time.monotonic()
                if received is not None:
                    self._receive(*received)
                    received_at = now
                    continue
                if now - received_at > patience_s:
                    return False
                stall = stall or _Stall(tickets, began_at=now - ASK_AFTER_S / 2, asked_at=now)
                self._handle_stall(stall, now)
            if self._history is not None:
                self._history.flush()
            for ticket in self._refused(tickets):
                ticket.raised = True
                assert isinstance(ticket.response, Failed)
                if ticket.response.not_in_view:
                    self._session.check_removed()
                raise UsageError(f"worker {self._session.rank}: {ticket.response.reason}")
        return True

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
                self._follow_slices()
                received = self._recv(0)
                if received is None:
                    return False
                self._receive(*received)
        return True

    def wait_briefly(self, tickets: Sequence[Ticket], seconds: float) -> bool:
        """Wait until all are answered, but not for longer than this. Return whether they are."""
        deadline = time.monotonic() + seconds
        with self._lock:
            while not self.ready(tickets):
                self._session.check_job()
                if (left := deadline - time.monotonic()) <= 0:
                    return False
                if (received := self._recv(left)) is not None:
                    self._receive(*received)
        return True

    def greet(self, make: Callable[[int], Request]) -> list[Response]:
        """Send the first request to all servers, to server 0 first: if it refuses, no other one receives it.

        `make(server)` makes it. A server that stores a slice in the place of another one gets it, too.
        """
        self._greeting = make
        return [self._greet(server) for server in range(len(self._addresses))]

    def _greet(self, server: int) -> Response:
        """Send the first request to a server. One that has lost its state gets what this worker has of it."""
        assert self._greeting is not None
        answer = self._introduce(server, self._greeting)
        if isinstance(answer, Recovering):
            self.on_recovering(server)
        return answer

    def _introduce(self, server: int, make: Callable[[int], Request]) -> Response:
        """Send the first request to a server, which may learn only later that this worker has joined the job."""
        deadline = time.monotonic() + KNOWN_S
        while True:
            ticket = self.send(server, make(server))
            is_known = not self._session.joined_late or time.monotonic() > deadline
            if is_known or not self.wait_briefly([ticket], KNOWN_S) or not _is_unknown(ticket):
                self.wait([ticket])
                assert ticket.response is not None
                return ticket.response
            time.sleep(RETRY_S)

    def _follow_slices(self) -> None:
        """Let all stores of this worker connect to the servers that store slices now, if that has changed."""
        if self._session.slice_addresses is not self._addresses:
            self._session.follow_slices()

    def follow(self) -> None:
        """Connect to the servers that store slices now, and repeat what the servers before have not answered.

        If another thread uses this client, it does so.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            before, self._addresses = self._addresses, self._session.slice_addresses
            for server, address in enumerate(self._addresses):
                if address is not None and address != before[server] and self._greeting is not None:
                    self._move(server, address)
        finally:
            self._lock.release()

    def _move(self, server: int, address: str) -> None:
        unanswered = [ticket for ticket in self._open.values() if ticket.server == server]
        self._endpoint.redirect(server, address)
        self._events.write("moved", slice=server, address=address, repeated=len(unanswered))
        self._greet(server)
        self.on_moved(server)
        for ticket in unanswered:
            if ticket.response is None:
                self._endpoint.send(server, ticket.frames)

    def unanswered_pushes(self, server: int) -> dict[int, list[int]]:
        """Return the clocks of the pushes that a server has not answered, by key."""
        found: dict[int, list[int]] = {}
        for ticket in self._open.values():
            if ticket.server == server and isinstance(ticket.request, Push):
                for key in ticket.request.keys:
                    found.setdefault(key, []).append(ticket.request.clock)
        return found

    def _note_contents(self, server: int, keys: list[int], contents: list[Contents]) -> None:
        """Record what an answer contains. The lists of keys are those of routes, so there are few of them."""
        self._contents[server, id(keys)] = keys, contents
        if len(self._contents) > _MAX_ANSWERS:
            for other in {server for server, _ in self._contents}:
                self._old_contents |= {(other, key): one for key, one in self.contents(other).items()}
            self._contents.clear()

    def contents(self, server: int) -> dict[int, Contents]:
        """Return for each key of a server what its weights on this worker contain, if the worker has read it."""
        found = {key: one for (other, key), one in self._old_contents.items() if other == server}
        for (other, _), (keys, contents) in self._contents.items():
            for one in contents if other == server else ():
                found |= _newer(one, one.keys or keys, found)
        return found

    def adopt_notes(self, server: int, log: WriteLog) -> None:
        """Take over what a lost server noted about the weights that it wrote and did not tell this worker."""
        found = self.contents(server)
        for note in log.notes():
            for written in note.written:
                ticket = self._open.get(written.request)  # without one, it was answered
                requested = ticket.request.keys if ticket and isinstance(ticket.request, Push | Pull) else []
                for one in written.contents:
                    found |= _newer(one, one.keys or requested, found, is_complete=note.is_complete)
        log.clear()
        self._contents = {place: known for place, known in self._contents.items() if place[0] != server}
        self._old_contents |= {(server, key): one for key, one in found.items()}

    def rewrite(self, server: int, make: Callable[[Request], Rewritten | None]) -> None:
        """Replace requests without an answer by what `make` returns: the request, its frames, and places for frames."""
        for ticket in self._open.values():
            if ticket.server == server and (made := make(ticket.request)) is not None:
                request, frames, places = made
                ticket.request, ticket.frames, ticket.places = request, [encode(request), *frames], places

    def restart(self, endpoint: Endpoint) -> None:
        """Use another endpoint from now on. Requests without an answer are dropped."""
        with self._lock:
            self._endpoint.close()
            self._endpoint = endpoint
            endpoint.placer = self._place
            self._open.clear()
            self._status.clear()
            self._addresses = self._session.slice_addresses

    def close(self) -> None:
        """Close the endpoint."""
        with self._lock:
            if self._history is not None:
                self._history.flush()
            self._endpoint.close()

    def _refused(self, tickets: Sequence[Ticket]) -> list[Ticket]:
        """Return those that a server refused and whose error was not raised yet: an error is raised once."""
        return [ticket for ticket in tickets if isinstance(ticket.response, Failed) and not ticket.raised]

    def _receive(self, peer: Peer, frames: list[memoryview]) -> None:
        self._heard_at[peer] = time.monotonic()
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
        if isinstance(response, SquaredNorm) and isinstance(ticket.request, MeasureNorm):
            self.norms[ticket.server] = ticket.request.clock, ticket.request.keys, response.square
        if isinstance(response, Done) and isinstance(ticket.request, Push | Pull) and response.contents:
            self._note_contents(ticket.server, ticket.request.keys, response.contents)
        if ticket.places and isinstance(response, Done):
            for place, frame in zip(ticket.places, frames[1:], strict=True):
                if frame is not place:
                    place[:] = frame
            ticket.frames = []
        else:
            ticket.frames = list(frames[1:])  # the request's frames are not needed any more, and may be large copies
        ticket.response = response
        if self._history is not None and isinstance(response, Done) and isinstance(ticket.request, Push):
            self._history.acked(ticket.server, ticket.request)

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

    def _recv(self, timeout_s: float) -> tuple[Peer, list[memoryview]] | None:
        """Receive a message. Ask the servers whose connection broke what they have received over it.

        A connection that breaks again at once is left to `_handle_stall`.
        """
        received = self._endpoint.recv(timeout_s)
        while self._endpoint.broken:
            server, now = self._endpoint.broken.pop(), time.monotonic()
            if now - self._lost_at.get(server, -math.inf) > LOST_S:
                self._lost_at[server] = now
                self._ask_about(ticket for ticket in self._open.values() if ticket.server == server)
        return received

    def _ask_about(self, tickets: Iterable[Ticket]) -> None:
        for ticket in list(tickets):
            self._endpoint.send(ticket.server, [encode(Ask(self.next_id(), ticket.id))])

    def _handle_stall(self, stall: _Stall, now: float) -> None:
        """Ask the servers about open requests, report what they wait for, and raise JobError at the deadline."""
        if now - stall.asked_at >= ASK_AFTER_S:
            stall.asked_at = now
            self._ask_about(self._open.values())  # the lost request may be a push that nobody waits for
        waited = now - stall.began_at
        servers = sorted({ticket.server for ticket in stall.tickets if ticket.response is None})
        text = "; ".join(filter(None, (self._what_holds_up(server, stall, now) for server in servers)))
        if waited > self.stall_seconds and text and now - stall.reported_at >= self.stall_seconds:
            stall.reported_at = now
            print(f"worker {self._session.rank} has waited {waited:.1f} s: {text}", file=sys.stderr, flush=True)
            self._events.write("stall", seconds=round(waited, 3), waiting=text)
        if waited > self._timeout_s:
            raise JobError(f"worker {self._session.rank}: no answer in {waited:.0f} s: {text}")

    def _what_holds_up(self, server: int, stall: _Stall, now: float) -> str:
        """Return what a server waits for, or that it does not answer. It is asked every `ASK_AFTER_S`."""
        address = self._addresses[server]
        if address is None:
            return f"no server stores slice {server} now"
        silent = now - max(stall.began_at, self._heard_at.get(server, 0.0))
        if silent > SILENT_S:
            return f"the server of slice {server} at {address} has not answered for {silent:.1f} s"
        return self._status.get(server, "")


def _newer(
    one: Contents, keys: Sequence[int], known: Mapping[int, Contents], *, is_complete: bool = True
) -> dict[int, Contents]:
    """Return what those of some keys contain that were written after what is known.

    Everything is newer than weights that were written in part: the server that did so is lost, and the version of the
    next one may be lower.
    """
    found: dict[int, Contents] = {}
    in_part: dict[int, Contents] = {}  # keys with the same contents have the same object
    for key in keys:
        before = known.get(key, UNREAD)
        if before.before is None and before.version >= one.version:
            continue
        if is_complete:
            found[key] = one
        else:
            complete = before.before or (before.version, before.clocks)
            found[key] = in_part.setdefault(id(before), replace(one, before=complete))
    return found


def _is_unknown(ticket: Ticket) -> bool:
    return isinstance(ticket.response, Failed) and ticket.response.not_in_view
