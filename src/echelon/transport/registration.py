"""Joining a job: connect to the scheduler, register, and wait for the roster. Workers and servers do the same."""

from __future__ import annotations

import atexit
import fcntl
import math
import os
import queue
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

from echelon.cluster.messages import (
    SERVER,
    Abort,
    ControlMessage,
    Finish,
    Member,
    Refused,
    Register,
    Registered,
    Return,
    Roster,
    ServersUnused,
)
from echelon.environment import Job
from echelon.errors import JobError, JoinRefused, UsageError
from echelon.fault_points import identify
from echelon.transport.admission.admission import connect
from echelon.transport.admission.credentials import Security
from echelon.transport.control import RECONNECT_S, ControlClient, Reconnection, connect_to_scheduler
from echelon.transport.interface import Endpoint, Transport

_SIOCGIFADDR = 0x8915
_ANNOUNCE_S = 1.0
_ANNOUNCED: set[tuple[str, int]] = set()  # the schedulers that have got this process's announcement
Handler = Callable[[ControlMessage], None]
Place = tuple[str, int, str, int | None]  # address of the scheduler, role and rank


class DepartedJobs:
    """The jobs that this process has left, by the address of their scheduler and the place in them.

    A job admits no process twice, and its scheduler may have ended. Joining it again would wait for the whole timeout
    and end with a misleading error. This record makes it fail at once, with an error that says what to do instead.
    """

    def __init__(self) -> None:
        self._places: set[Place] = set()

    def add(self, job: Job) -> None:
        """Record that this process has left a job."""
        self._places.add(place_of(job))

    def __contains__(self, job: Job) -> bool:
        return place_of(job) in self._places

    @contextmanager
    def joining(self, job: Job) -> Iterator[float]:
        """Yield how many seconds to try to connect; turn a failure to join a departed job into a UsageError."""
        departed = job in self
        try:
            yield 0.0 if departed else job.timeout_s
        except JobError as error:
            if not departed:
                raise
            scheduler = f"{job.scheduler_host}:{job.scheduler_port}"
            raise UsageError(
                f"this process has left the job of {scheduler}, and a job admits no process twice: start a new job, "
                "or create all stores and Trainers before the process leaves the job"
            ) from error
        if departed:  # a new job has the same address
            self._places.discard(place_of(job))


DEPARTED = DepartedJobs()


class _Mailbox:
    """Keeps the scheduler's messages until a handler is set, then passes them on in order."""

    def __init__(self) -> None:
        self.kept: queue.SimpleQueue[ControlMessage] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._handler: Handler = self.kept.put

    def receive(self, message: ControlMessage) -> None:
        with self._lock:
            self._handler(message)

    def set_handler(self, handler: Handler) -> None:
        with self._lock:
            self._handler = handler
            while not self.kept.empty():
                handler(self.kept.get())


@dataclass(frozen=True, slots=True)
class Registration:
    """A process's place in the job.

    `member`: this process, as the others know it. `set_handler(handler)` passes all control messages to `handler` from
    now on, beginning with those received so far.
    """

    member: Member
    roster: Roster
    control: ControlClient
    endpoint: Endpoint | None
    set_handler: Callable[[Handler], None]

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self.member.rank


@contextmanager
def register(job: Job, role: str, transport: Transport, departed: DepartedJobs = DEPARTED) -> Iterator[Registration]:
    """Join the job, wait until it is complete, and leave it at the end of the block.

    PS_VERBOSE=1 prints the members of the job, PS_VERBOSE=2 every control message as well.
    """
    mailbox = _Mailbox()

    def receive(message: ControlMessage) -> None:
        if job.verbose >= 2:
            print(f"{role} (pid {os.getpid()}) received {message}", file=sys.stderr, flush=True)
        mailbox.receive(message)

    with departed.joining(job) as timeout_s, ExitStack() as undo:
        who = role if job.rank is None else f"{role} {job.rank}"
        configured = configured_host(job)  # first, because a mistake needs no scheduler to be found
        channel = connect_to_scheduler(job, timeout_s, who)
        undo.callback(channel.close)
        host = configured or str(channel.socket.getsockname()[0])  # the address that reaches the scheduler
        endpoint = transport.serve(host) if role == SERVER else None
        if endpoint is not None:
            undo.callback(endpoint.close)
        address = endpoint.address if endpoint else ""
        request = Register(role, job.rank, host, os.getpid(), address, secrets.token_hex(16))
        again = Reconnection(who, job, min(RECONNECT_S, timeout_s))
        control = ControlClient(channel, receive, job.heartbeat_timeout_s, again, lambda: nullcontext(request))
        undo.callback(control.close)
        control.send(request)
        rank, roster = _wait_for_roster(job, role, control, mailbox.kept)
        identify(role, rank)
        member = Member(role, rank, host, request.pid, address, request.token)
        greeting = Return(member, roster.view, roster.members, roster.slices)
        control.greeting = lambda: nullcontext(greeting)
        undo = undo.pop_all()
    with undo:
        if job.verbose:
            members = ", ".join(str(member) for member in roster.members)
            scheduler = f"{job.scheduler_host}:{job.scheduler_port}"
            print(f"{role} {rank} at {host} joined the job of {scheduler}: {members}", file=sys.stderr, flush=True)
        undo.callback(departed.add, job)
        yield Registration(member, roster, control, endpoint, mailbox.set_handler)


def place_of(job: Job) -> Place:
    """Return what identifies a process of a job in this process."""
    return job.scheduler_host, job.scheduler_port, job.role, job.rank


def announce_servers_unused(job: Job, store: str) -> None:
    """Tell the scheduler, if one listens, that this worker has a store without servers, until this process ends.

    Otherwise the scheduler and the servers would give up, and end the job, when the worker does not register in time.
    One announcement per process and job is enough.
    """
    address = job.scheduler_host, job.scheduler_port
    if address in _ANNOUNCED:
        return
    try:
        channel = connect(address, Security.of(job), _ANNOUNCE_S)
    except OSError:
        return  # nobody waits for this worker
    _ANNOUNCED.add(address)
    control = ControlClient(channel, lambda _: None, job.heartbeat_timeout_s)
    control.send(ServersUnused(store))
    atexit.register(control.close)


def _wait_for_roster(
    job: Job, role: str, control: ControlClient, messages: queue.SimpleQueue[ControlMessage]
) -> tuple[int, Roster]:
    rank = -1
    deadline = time.monotonic() + job.timeout_s
    while time.monotonic() < deadline:
        if control.lost:
            raise JobError(f"{role}: {control.lost} before the job started")
        try:
            message = messages.get(timeout=1.0)
        except queue.Empty:
            continue
        match message:
            case Registered(number):
                rank = number
            case Roster():
                return rank, message
            case Refused(reason):
                is_final = job.joins and not job.restarts  # the place of one that was killed may not be free yet
                kind = JoinRefused if is_final else JobError
                raise kind(f"{role}: the scheduler rejected this process: {reason}")
            case Abort(reason):
                raise JobError(f"{role} {rank}: the job cannot start: {reason}")
            case ServersUnused():
                deadline = math.inf
            case Finish():
                raise SystemExit(0)  # the job ended without any worker, and none failed: there is nothing to serve
    raise JobError(
        f"{role} {rank}: the job of {job.num_workers} workers and {job.num_servers} servers was not complete after "
        f"{job.timeout_s:g} s; the scheduler's output says which processes are missing"
    )


def configured_host(job: Job) -> str | None:
    """Return the address that others reach this process at, if the job names it or its network interface."""
    if job.host:
        return job.host
    return interface_address(job.interface) if job.interface else None


def interface_address(name: str) -> str:
    """Return the IPv4 address of a network interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            names = ", ".join(interface for _, interface in socket.if_nameindex())
            raise UsageError(
                f"network interface {name!r} has no IPv4 address (-i or DMLC_INTERFACE); this machine has {names}"
            ) from None
    return socket.inet_ntoa(answer[20:24])
