"""The scheduler's loop: accepts connections, reads them in turn, sends without blocking, and notices who is silent."""

from __future__ import annotations

import selectors
import socket
import sys
import time
import traceback
from collections import deque
from contextlib import suppress

from echelon.cluster.membership.members import Send
from echelon.cluster.membership.membership import Membership
from echelon.cluster.membership.rules import Rules
from echelon.cluster.messages import (
    Abort,
    ControlMessage,
    FromProcess,
    Heartbeat,
    Malformed,
    Refused,
    Removed,
    Return,
    View,
    shorten,
)
from echelon.environment import Job
from echelon.errors import NOT_WHOLE
from echelon.observe.events import EventLog
from echelon.scheduler.dispatch import Dispatch
from echelon.scheduler.notes import LauncherNotes
from echelon.scheduler.peer import Peer, PeerError
from echelon.transport.admission.admission import Admission, Strangers, Unproven
from echelon.transport.admission.credentials import Security
from echelon.transport.awake import AwakeClock
from echelon.transport.control import frame, heartbeat_interval

END_S = 5.0  # that the processes of a job have to read why it is over, and to close their connections
_HEARTBEAT = Heartbeat()
NOT_WHOLE_TEXT = "the result is not whole: "
MAX_OTHERS = 256  # connections that are not of processes of the job, as those of launchers


class Scheduler:
    """The connections of a job and the state machine that they drive."""

    def __init__(self, job: Job, listener: socket.socket, events: EventLog, rules: Rules | None = None) -> None:
        self._job = job
        self._events = events
        self._membership = Membership(job.num_workers, job.num_servers, rules)
        self._notes = LauncherNotes(job)
        self._dispatch = Dispatch(self._membership, events, job.num_servers)
        self._selector = selectors.DefaultSelector()
        self._admission = Admission(listener, Security.of(job), self._selector, Strangers("the scheduler", events))
        self._peers: dict[int, Peer] = {}  # the oldest first
        self._failed: deque[tuple[Peer, str]] = deque()  # connections that have to end, and why
        self._unreachable: deque[tuple[Peer, str]] = deque()  # those to which nothing can be sent any more
        self._last_number = 0
        self._clock = AwakeClock(time.monotonic())
        self._now = self._clock.tick(time.monotonic())
        self._waits_since = self._now  # for the processes that have not registered
        self._stall_printed = False
        self._ends_at: float | None = None
        self._heartbeat_s = heartbeat_interval(job.heartbeat_timeout_s)
        self._beat_at = self._now

    def run(self) -> int:
        """Run until the job is over; return 0 if it succeeded, NOT_WHOLE if its result is not whole, and else 1."""
        try:
            while not self._has_ended():
                self._turn()
        finally:
            for peer in list(self._peers.values()):
                self._drop(peer)
            self._admission.close()
            self._selector.close()
        status, why = self._verdict()
        if why:
            print(why, file=sys.stderr, flush=True)
        if status == NOT_WHOLE:
            self._events.write("not_whole", reason=why.removeprefix(NOT_WHOLE_TEXT))
        return status

    def _verdict(self) -> tuple[int, str]:
        """Return the exit status of the job, and why it is not 0."""
        if self._membership.failure:
            return 1, f"job stopped: {self._membership.failure}"
        if defects := self._membership.defects:
            more = f" (and {len(defects) - 1} more)" if len(defects) > 1 else ""
            return NOT_WHOLE, f"{NOT_WHOLE_TEXT}{defects[0]}{more}"
        return 0, ""

    def _turn(self) -> None:
        """Wait for events, read each connection that has messages, once, and remove those that have failed."""
        resuming = [peer for peer in self._peers.values() if peer.resumes_at is not None]
        wait_s = min((peer.resumes_at - self._now for peer in resuming if peer.resumes_at is not None), default=1.0)
        ready = self._selector.select(min(max(0.0, wait_s), self._heartbeat_s / 2, 0.5))
        self._now = self._clock.tick(time.monotonic())
        for key, events in ready:
            if isinstance(key.data, Admission | Unproven):
                self._admit(key.data)
                continue
            if events & selectors.EVENT_WRITE:
                self._flush(key.data)
            if events & selectors.EVENT_READ:
                self._read(key.data)
        for peer in resuming:
            if peer.resumes_at is not None and peer.resumes_at <= self._now:
                self._read(peer)
        self._check_time()
        self._remove_failed()

    def _admit(self, source: Admission | Unproven) -> None:
        """Continue a handshake. If it is complete, the connection is a new peer."""
        channel = self._admission.advance(source)
        if channel is None:
            return
        self._last_number += 1
        peer = self._peers[self._last_number] = Peer(self._last_number, channel, self._now)
        others = [peer for peer in self._peers.values() if not self._membership.is_used(peer.number)]
        if len(others) > MAX_OTHERS:
            self._fail(others[0], f"{MAX_OTHERS} newer connections have not registered, either")
        self._read(peer)

    def _read(self, peer: Peer) -> None:
        """Handle the messages of a connection's turn. An exception ends this connection, and nothing else."""
        if peer.number not in self._peers:
            return
        try:
            for message in peer.receive(self._now):
                self._handle(peer, message)
        except Malformed as error:
            self._events.count("malformed", reason=str(error))
            self._fail(peer, str(error))
        except (PeerError, OSError) as error:
            self._fail(peer, str(error))
        except Exception as error:  # an error of the scheduler itself
            self._events.count("error", reason=repr(error)[:300])
            traceback.print_exc()
            self._fail(peer, f"the scheduler could not handle its message: {error!r}")
        else:
            self._watch(peer)

    def _handle(self, peer: Peer, message: FromProcess) -> None:
        earlier = self._membership.connection_of(message.member.token) if isinstance(message, Return) else None
        sends = self._dispatch.handle(peer.number, message)
        peer.joined = peer.joined or self._membership.is_used(peer.number)
        if earlier in self._peers and self._membership.member(earlier) is None:
            self._drop(self._peers[earlier])  # the process has come back on this connection
        self._send(sends)

    def _send(self, sends: list[Send]) -> None:
        """Send messages, and what follows from the change of the members that caused them."""
        self._send_now(sends)
        self._send_now(self._dispatch.follow())

    def _send_now(self, sends: list[Send]) -> None:
        last: tuple[ControlMessage | None, bytes] = None, b""
        for to, message in sends:
            if message is not last[0]:
                last = message, frame(message)
                self._notes.record(message, self._verdict)
                if isinstance(message, View):
                    self._dispatch.record_view(message)
            if peer := self._peers.get(to):
                try:
                    peer.queue(last[1], self._now)
                except PeerError as error:
                    self._fail(peer, str(error))
                except OSError as error:
                    self._unreachable.append((peer, str(error)))
                else:
                    self._watch(peer)

    def _flush(self, peer: Peer) -> None:
        try:
            peer.flush(self._now)
            self._watch(peer)
        except OSError as error:
            self._unreachable.append((peer, str(error)))

    def _watch(self, peer: Peer) -> None:
        """Let the selector report when the connection can be read, unless its next turn is set, and written."""
        wanted = selectors.EVENT_READ if peer.resumes_at is None else 0
        wanted |= selectors.EVENT_WRITE if peer.has_output else 0
        if wanted == peer.watched or peer.number not in self._peers:
            return
        if not peer.watched:
            self._selector.register(peer.channel, wanted, peer)
        elif not wanted:
            self._selector.unregister(peer.channel)
        else:
            self._selector.modify(peer.channel, wanted, peer)
        peer.watched = wanted

    def _fail(self, peer: Peer, why: str) -> None:
        """End a connection after this turn. Ending it now could call this function again, without a bound."""
        self._failed.append((peer, why))

    def _remove_failed(self) -> None:
        while self._failed or self._unreachable:
            while self._unreachable:  # it may have said why it leaves before it closed the connection
                peer, why = self._unreachable.popleft()
                self._read(peer)
                self._fail(peer, why)
            peer, why = self._failed.popleft()
            if peer.number not in self._peers:
                continue
            sends = self._dispatch.lost(peer.number, why)
            with suppress(PeerError, OSError):  # most of these connections are broken
                peer.queue(frame(self._farewell(peer, why)), self._now)
            self._drop(peer)
            self._send(sends)

    def _farewell(self, peer: Peer, why: str) -> ControlMessage:
        """Return what to tell a process whose connection the scheduler ends. It may be alive and come back."""
        if not peer.joined:
            return Refused(why)
        if self._membership.running and not self._membership.over:
            return Removed(self._membership.view, shorten(why))
        return Abort(f"the scheduler declared this process dead: {why}")

    def _drop(self, peer: Peer) -> None:
        del self._peers[peer.number]
        if peer.watched:
            self._selector.unregister(peer.channel)
        peer.channel.close()

    def _check_time(self) -> None:
        """Send heartbeats, find silent processes, and end what waits for time."""
        self._admission.expire()
        if self._now - self._beat_at >= self._heartbeat_s or self._clock.was_late:
            self._beat_at = self._now
            self._send([Send(peer.number, _HEARTBEAT) for peer in self._peers.values() if not peer.has_output])
        if self._clock.was_late:
            return
        for peer in list(self._peers.values()):
            if peer.dead_because(self._now, self._job.heartbeat_timeout_s) is not None:
                self._judge(peer)
        self._send(self._dispatch.tick(self._now))
        self._handle_kept()
        self._check_registration()

    def _judge(self, peer: Peer) -> None:
        """End the connection of a process that seems dead, unless bytes of it wait to be read."""
        self._read(peer)
        if why := peer.dead_because(self._now, self._job.heartbeat_timeout_s):
            self._fail(peer, why)

    def _handle_kept(self) -> None:
        """Handle the messages that came while the members of the job were unknown."""
        for number, message in self._dispatch.take_kept():
            if peer := self._peers.get(number):
                try:
                    self._handle(peer, message)
                except Malformed as error:
                    self._fail(peer, str(error))
            elif self._membership.member(number) is not None:  # it has left, and closed its connection
                with suppress(Malformed):
                    self._send(self._dispatch.handle(number, message))

    def _check_registration(self) -> None:
        """Stop the job if it does not gather in time."""
        if not self._membership.has_time_limit:
            self._waits_since = self._now
            return
        waited = self._now - self._waits_since
        if waited > self._job.stall_seconds and not self._stall_printed:
            self._stall_printed = True
            print(f"waiting for {self._membership.waiting_for()} to register", file=sys.stderr, flush=True)
        if waited > self._job.timeout_s:
            missing = self._membership.waiting_for()
            self._send(self._membership.abort(f"{missing} did not register in {waited:.0f} s"))

    def _has_ended(self) -> bool:
        """Whether the job is over and its processes have closed their connections, or had time to do so.

        Other connections are not waited for: they must not turn a finished job into one that hangs.
        """
        if not self._membership.over:
            return False
        if self._ends_at is None:
            self._ends_at = self._now + END_S
        return self._now > self._ends_at or not any(peer.joined for peer in self._peers.values())
