"""The scheduler process: a thin loop around the pure state machine `cluster.membership`. Imports no torch.

It accepts connections, passes messages to the state machine and sends what that returns. `python -m echelon.scheduler`
runs the scheduler of the job that the environment describes.
"""

from __future__ import annotations

import os
import selectors
import socket
import sys
import time

from echelon.cluster.membership import Membership, Send
from echelon.cluster.messages import (
    Abort,
    Barrier,
    ControlMessage,
    Departure,
    Halt,
    Heartbeat,
    Leave,
    Malformed,
    Refused,
    Register,
    ServersUnused,
    StoreClosed,
    StoreEnding,
    StoreOpened,
    View,
    WorkerExited,
)
from echelon.environment import Job
from echelon.errors import EchelonError, UsageError
from echelon.observe.events import EventLog
from echelon.transport.admission import Admission, Strangers, Unproven
from echelon.transport.channel import Channel, send_all
from echelon.transport.control import HEARTBEAT_S, READ_BYTES, SEND_S, FrameReader, frame
from echelon.transport.credentials import Security
from echelon.transport.sockets import listen


def serve(job: Job, listener: socket.socket | None = None) -> int:
    """Run until the job is over; return 0 if it succeeded. Without `listener`, inherit or create the socket."""
    listener = listener or _listener(job)
    with EventLog.open(job.run_dir, "scheduler", 0) as events:
        return _Scheduler(job, listener, events).run()


def _listener(job: Job) -> socket.socket:
    if job.listen_fd is not None:
        return socket.socket(fileno=job.listen_fd)
    host, port = job.scheduler_host, job.scheduler_port
    if not port:
        raise UsageError("the scheduler has no port: set DMLC_PS_ROOT_PORT, to the same value for all roles")
    try:
        return listen(job.host or host, port)
    except OSError as error:
        raise UsageError(
            f"the scheduler cannot listen at port {port}: {os.strerror(error.errno or 0)}; set another "
            "DMLC_PS_ROOT_PORT for all roles"
        ) from error


class _Peer:
    """A connection and when data last arrived on it."""

    def __init__(self, channel: Channel, now: float) -> None:
        self.channel = channel
        self.reader = FrameReader()
        self.last_received = now


class _Scheduler:
    def __init__(self, job: Job, listener: socket.socket, events: EventLog) -> None:
        self._job = job
        self._events = events
        self._membership = Membership(job.num_workers, job.num_servers)
        self._selector = selectors.DefaultSelector()
        strangers = Strangers("the scheduler", events)
        self._admission = Admission(listener, Security.of(job), self._selector, strangers)
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._peers: dict[int, _Peer] = {}
        self._last_number = 0
        self._waits_since = time.monotonic()  # for the processes that have not registered
        self._stall_printed = False

    def run(self) -> int:
        try:
            while not self._membership.over or any(map(self._membership.waits_for, self._peers)):
                for key, _ in self._selector.select(HEARTBEAT_S / 2):
                    if isinstance(key.data, Admission | Unproven):
                        self._admit(key.data)
                    else:
                        self._read(key.data)
                self._admission.expire()
                if not self._check_time():
                    break
        finally:
            for peer in list(self._peers):
                self._drop(peer)
            self._admission.close()
            self._selector.close()
        if self._membership.failure:
            print(f"job stopped: {self._membership.failure}", file=sys.stderr, flush=True)
            return 1
        return 0

    def _admit(self, source: Admission | Unproven) -> None:
        """Let a process in that has proved the credentials of the job."""
        channel = self._admission.advance(source)
        if channel is not None:
            self._last_number += 1
            self._peers[self._last_number] = _Peer(channel, time.monotonic())
            self._selector.register(channel, selectors.EVENT_READ, self._last_number)

    def _read(self, number: int) -> None:
        peer = self._peers.get(number)
        if peer is None:
            return
        try:
            count = peer.channel.recv_into(self._buffer)
            if not count:
                self._lost(number, "its connection closed")
                return
            peer.last_received = time.monotonic()
            for message in peer.reader.feed(self._buffer[:count]):
                self._handle(number, message)
        except BlockingIOError:
            return  # a part of a TLS record
        except Malformed as error:
            self._events.write("malformed", reason=str(error))
            self._lost(number, str(error))
        except OSError as error:
            self._lost(number, str(error))

    def _handle(self, number: int, message: ControlMessage) -> None:
        membership = self._membership
        match message:
            case Register():
                sends = membership.register(number, message)
                self._events.write("registered", who=str(membership.member(number) or message))
            case Barrier(sequence, store):
                sends = membership.barrier(number, sequence, store)
            case StoreOpened(store):
                sends = membership.store_opened(number, store)
                self._write_stores("store_opened", number, store)
            case StoreEnding(store):
                sends = membership.store_ending(number, store)
            case StoreClosed(store):
                sends = membership.store_closed(number, store)
                self._write_stores("store_closed", number, store)
            case Halt():
                sends = membership.halt(message) if membership.member(number) else []
            case Leave():
                sends = membership.leave(number, message)
            case WorkerExited():
                sends = membership.worker_exited(message)
            case ServersUnused():
                self._say_unused(message)
                sends = membership.servers_unused(number, message)
            case Heartbeat():
                sends = []
            case _:
                sends = [Send(number, Refused(f"the scheduler does not accept {type(message).__name__} messages"))]
        self._send(sends)

    def _write_stores(self, event: str, number: int, store: int) -> None:
        """Write that a worker has opened or closed a store, and how many it has open now."""
        if member := self._membership.member(number):
            open_stores = self._membership.num_open_stores(number)
            self._events.write(event, worker=member.rank, store=store, open=open_stores)

    def _say_unused(self, message: ServersUnused) -> None:
        """Say once that the servers are idle."""
        if self._membership.unused is None and not self._membership.running:
            servers = "1 server" if self._job.num_servers == 1 else f"{self._job.num_servers} servers"
            print(
                f"{message.store} runs without servers: it does not use the {servers} of this job (-s 0 starts none)",
                file=sys.stderr,
                flush=True,
            )

    def _lost(self, number: int, why: str) -> None:
        self._drop(number)
        self._send(self._membership.lost(number, why))

    def _send(self, sends: list[Send]) -> None:
        view: View | None = None
        for to, message in sends:
            if isinstance(message, View):
                view = message
            if peer := self._peers.get(to):
                try:
                    send_all(peer.channel, frame(message), SEND_S)
                except OSError:
                    pass  # the next read reports that this peer is lost
        if view is not None:
            departure = view.departure.value
            self._events.write(
                "view", number=view.number, workers=view.workers, reason=view.reason, departure=departure
            )
            if view.departure is not Departure.LEFT:
                left = len(view.workers)
                print(f"view {view.number}: {view.reason}; {left} workers continue", file=sys.stderr, flush=True)

    def _check_time(self) -> bool:
        """Remove silent processes. Return False if the job did not gather in time and the scheduler stops."""
        now = time.monotonic()
        for number, peer in list(self._peers.items()):
            silent = now - peer.last_received
            if silent > self._job.heartbeat_timeout_s:
                why = f"no message for {silent:.1f} s"
                self._send([Send(number, Abort(f"the scheduler declared this process dead: {why}"))])
                self._lost(number, why)
        if not self._membership.has_time_limit:
            self._waits_since = now
            return True
        waited = now - self._waits_since
        if waited > self._job.stall_seconds and not self._stall_printed:
            self._stall_printed = True
            print(f"waiting for {self._membership.waiting_for()} to register", file=sys.stderr, flush=True)
        if waited > self._job.timeout_s:
            self._membership.failure = f"{self._membership.waiting_for()} did not register in {waited:.0f} s"
            return False
        return True

    def _drop(self, number: int) -> None:
        peer = self._peers.pop(number)
        self._selector.unregister(peer.channel)
        peer.channel.close()


if __name__ == "__main__":
    try:
        sys.exit(serve(Job.from_environment()))
    except EchelonError as error:
        print(f"echelon: {error}", file=sys.stderr)
        sys.exit(2)
