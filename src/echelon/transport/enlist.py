"""Joining a job: bind, connect to the scheduler, register, wait for the roster. The same for workers and servers."""

from __future__ import annotations

import fcntl
import os
import queue
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from echelon.cluster.messages import SERVER, Abort, ControlMessage, Finish, Refused, Register, Registered, Roster
from echelon.environment import Job
from echelon.errors import JobError, UsageError
from echelon.transport.control import ControlClient, connect
from echelon.transport.interface import Endpoint, Transport

_SIOCGIFADDR = 0x8915
_left: set[tuple[str, int]] = set()  # the jobs, by their schedulers, that this process was in


class _Mail:
    """The scheduler's messages: kept until somebody is ready for them, then handed on, in order."""

    def __init__(self) -> None:
        self.kept: queue.SimpleQueue[ControlMessage] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._on_message: Callable[[ControlMessage], None] = self.kept.put

    def receive(self, message: ControlMessage) -> None:
        with self._lock:
            self._on_message(message)

    def listen(self, on_message: Callable[[ControlMessage], None]) -> None:
        with self._lock:
            self._on_message = on_message
            while not self.kept.empty():
                on_message(self.kept.get())


@dataclass(frozen=True, slots=True)
class Post:
    """A process's place in the job. `listen` says who takes the control messages from now on, the kept ones first."""

    rank: int
    roster: Roster
    control: ControlClient
    endpoint: Endpoint | None
    listen: Callable[[Callable[[ControlMessage], None]], None]


@contextmanager
def enlist(job: Job, role: str, transport: Transport) -> Iterator[Post]:
    """Register and wait until everybody is there. PS_VERBOSE: 1 tells who is there, 2 every control message, too."""
    mail = _Mail()

    def receive(message: ControlMessage) -> None:
        if job.verbose >= 2:
            print(f"{role} (pid {os.getpid()}) hears {message}", file=sys.stderr, flush=True)
        mail.receive(message)

    number = "" if job.rank is None else f" {job.rank}"
    who = f"{role}{number} (pid {os.getpid()})"
    with _joining_once(job) as patience_s, ExitStack() as undo:
        connection = connect(job.scheduler_host, job.scheduler_port, patience_s, who, job.stall_seconds)
        undo.callback(connection.close)
        host = own_host(job, connection)
        endpoint = transport.serve(host) if role == SERVER else None
        if endpoint is not None:
            undo.callback(endpoint.close)
        control = ControlClient(connection, receive)
        undo.callback(control.close)
        control.send(Register(role, job.rank, host, os.getpid(), endpoint.address if endpoint else ""))
        rank, roster = _wait(job, role, control, mail.kept)
        undo = undo.pop_all()
    with undo:
        if job.verbose:
            others = ", ".join(str(member) for member in roster.members)
            where = f"{job.scheduler_host}:{job.scheduler_port}"
            print(f"{role} {rank} at {host} joined the job of {where}: {others}", file=sys.stderr, flush=True)
        undo.callback(_left.add, (job.scheduler_host, job.scheduler_port))
        yield Post(rank, roster, control, endpoint, mail.listen)


@contextmanager
def _joining_once(job: Job) -> Iterator[float]:
    """How long to try. The scheduler of a job that this process has left is gone, or admits nobody any more."""
    where = (job.scheduler_host, job.scheduler_port)
    left = where in _left
    try:
        yield 0.0 if left else job.timeout_s
    except JobError as error:
        if not left:
            raise
        raise UsageError(
            f"this process has left the job of {where[0]}:{where[1]} when its store was closed, and cannot join it "
            "again: make one store, give it to every Trainer (kvstore=store), and close when all is done"
        ) from error
    if left:  # a new job at the same address; what another thread has just left stays noted
        _left.discard(where)


def _wait(
    job: Job, role: str, control: ControlClient, messages: queue.SimpleQueue[ControlMessage]
) -> tuple[int, Roster]:
    rank = -1
    deadline = time.monotonic() + job.timeout_s
    while time.monotonic() < deadline:
        if control.lost:
            raise JobError(f"{role}: {control.lost} before the job began")
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
                raise JobError(f"{role}: the scheduler refused this process: {reason}")
            case Abort(reason):
                raise JobError(f"{role} {rank}: the job cannot begin: {reason}")
            case Finish():
                raise SystemExit(0)  # no worker came, and none failed: nothing to serve
    raise JobError(
        f"{role} {rank}: the job of {job.num_workers} workers and {job.num_servers} servers did not gather "
        f"in {job.timeout_s:g} s; the scheduler's output says who is missing"
    )


def own_host(job: Job, connection: socket.socket) -> str:
    """The address this process is reached at: told, of the named interface, or the one that reaches the scheduler."""
    if job.host:
        return job.host
    if job.interface:
        return interface_address(job.interface)
    return str(connection.getsockname()[0])


def interface_address(name: str) -> str:
    """The IPv4 address of a network interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            names = ", ".join(interface for _, interface in socket.if_nameindex())
            raise UsageError(
                f"no address on network interface {name!r} (-i or DMLC_INTERFACE); this machine has {names}"
            ) from None
    return socket.inet_ntoa(answer[20:24])
