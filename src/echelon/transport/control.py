"""Control connections: length-prefixed messages between the scheduler and every other process.

The kernel closes the sockets of a killed process, so the scheduler detects a death at once and without false alarms.
Heartbeats, in both directions, are needed for machines that disappear without closing their connections, for stopped
processes, and for networks that are cut.
"""

from __future__ import annotations

import math
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from echelon.cluster.messages import ControlMessage, Heartbeat, Malformed, decode_control, encode
from echelon.environment import Job
from echelon.errors import JobError
from echelon.transport.admission.admission import ConnectionRefused, connect
from echelon.transport.admission.channel import Channel, send_all
from echelon.transport.admission.credentials import Security
from echelon.transport.awake import LATE_S, AwakeClock
from echelon.transport.framing import FrameReader, with_length

HEARTBEAT_S = 2.0
RECONNECT_S = 60.0  # that a process tries to reach the scheduler again before it gives up
RETRY_S = 0.1
READ_BYTES = 64 << 10  # received at once: at least a TLS record, so that none is received in parts
SEND_S = 5.0
CONNECT_S = 5.0


def frame(message: ControlMessage) -> bytes:
    """Return a message's bytes, preceded by their length."""
    return with_length(encode(message))


def heartbeat_interval(timeout_s: float) -> float:
    """Return how often a process sends a heartbeat if it counts as lost after `timeout_s`."""
    return min(HEARTBEAT_S, timeout_s / 3)


class Deadline:
    """A wait that starts when it is created, expires after `timeout_s`, and reports at most every `stall_seconds`."""

    def __init__(self, who: str, timeout_s: float, stall_seconds: float) -> None:
        self._who = who
        self._timeout_s = timeout_s
        self._stall_seconds = stall_seconds
        self._began = time.monotonic()
        self._next_report = self._began + stall_seconds

    @property
    def left_s(self) -> float:
        """The seconds left, at least 0.1: many functions take a timeout of 0 as "no timeout"."""
        return max(self._began + self._timeout_s - time.monotonic(), 0.1)

    @property
    def expired(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self._began + self._timeout_s

    def report(self, what: Callable[[], str], setting: str = " (ECHELON_TIMEOUT)") -> None:
        """Print what this process waits for, if a report is due. `setting` says what changes the timeout."""
        now = time.monotonic()
        if now < self._next_report:
            return
        self._next_report += self._stall_seconds
        waited = f"{self._who} (pid {os.getpid()}) has waited {now - self._began:.1f} s for {what()}"
        print(f"{waited}, and waits up to {self._timeout_s:g} s{setting}", file=sys.stderr, flush=True)


def connect_to_scheduler(job: Job, timeout_s: float, who: str) -> Channel:
    """Connect to the scheduler, which may not have started yet. `who` names this process in reports of the wait."""
    host, port = job.scheduler_host, job.scheduler_port
    security = Security.of(job)
    deadline = Deadline(who, timeout_s, job.stall_seconds)
    while True:
        try:
            return connect((host, port), security, min(CONNECT_S, deadline.left_s))
        except OSError as error:
            if job.joins and isinstance(error, ConnectionRefusedError):
                raise JobError(
                    f"the job at {host}:{port} has ended before this {job.role} joined it: {error}"
                ) from error
            if deadline.expired:
                raise JobError(
                    f"no scheduler at {host}:{port} after {timeout_s:g} s ({error}); is it running, and are "
                    "DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT correct?"
                ) from error
            why = str(error)
            deadline.report(lambda: f"the scheduler at {host}:{port} ({why})")  # noqa: B023  (called at once)
            time.sleep(0.05)


@dataclass(frozen=True, slots=True)
class Reconnection:
    """How a process replaces its connection to the scheduler: when, where to, and for how long it tries."""

    who: str
    job: Job
    give_up_s: float = RECONNECT_S

    @property
    def address(self) -> str:
        """The scheduler's address."""
        return f"{self.job.scheduler_host}:{self.job.scheduler_port}"

    def connect(self, timeout_s: float) -> Channel:
        """Try once to connect. Raises OSError."""
        return connect((self.job.scheduler_host, self.job.scheduler_port), Security.of(self.job), timeout_s)


Greeting = Callable[[], AbstractContextManager[ControlMessage]]


class ControlClient:
    """One process's connection to the scheduler. A thread reads it, sends heartbeats and passes messages on.

    With `reconnection`, a connection that closes or is silent for the heartbeat timeout is replaced by another one; a
    second thread connects. The first message on the new connection is that of `greeting`, which says who this process
    is and what the scheduler has to know. It is a context manager that keeps other threads from changing that while it
    is sent. A message that is sent while there is no connection is dropped for the same reason.

    A silent connection stays in use, because the scheduler may only be slow. It is closed when the scheduler has
    answered on the new one: a closed connection means to the scheduler that the process has died.

    When the connection is lost for good, `lost` says why.
    """

    def __init__(
        self,
        channel: Channel,
        on_message: Callable[[ControlMessage], None],
        heartbeat_timeout_s: float,
        reconnection: Reconnection | None = None,
        greeting: Greeting | None = None,
    ) -> None:
        self.greeting = greeting
        self.on_returned: Callable[[], None] = lambda: None  # after the greeting on a new connection
        self.lost: str | None = None
        self.reconnecting: str | None = None  # why the connection is being replaced
        self._channel = channel
        self._on_message = on_message
        self._reconnection = reconnection
        self._heartbeat_s = heartbeat_interval(heartbeat_timeout_s)
        self._timeout_s = math.inf if reconnection is None else heartbeat_timeout_s
        self._lock = threading.Lock()  # for sending
        self._closing = threading.Event()
        self._connected = threading.Event()  # something can be sent, or the connection is lost for good
        self._connected.set()
        self._broken: str | None = None  # why nothing can be sent
        self._retired: list[Channel] = []  # earlier connections, until the scheduler has answered on the present one
        self._replacement: threading.Thread | None = None
        self._thread = threading.Thread(target=self._run, name="echelon-control", daemon=True)
        self._thread.start()

    def send(self, message: ControlMessage) -> None:
        """Send a message. If the connection is broken, the reading thread reports it or replaces the connection."""
        with self._lock:
            if not self._connected.is_set():
                return
            try:
                send_all(self._channel, frame(message), SEND_S)
            except OSError as error:
                self._broken = self._broken or str(error)
                self._channel.shutdown()  # wakes the reading thread

    def wait_until_connected(self, timeout_s: float) -> bool:
        """Wait while there is no connection. Return whether there is one."""
        return self._connected.wait(timeout_s) and self.lost is None

    def close(self) -> None:
        """Close the connection and stop the threads."""
        self._closing.set()
        self._channel.shutdown()
        for thread in (self._thread, self._replacement):
            if thread is not None and thread is not threading.current_thread():
                thread.join(CONNECT_S + 1.0)
        self._channel.close()
        self._close_retired()

    def _run(self) -> None:
        while not self._closing.is_set() and self.lost is None:
            channel = self._channel
            try:
                why = self._read(channel)
            except (OSError, Malformed) as error:
                why = str(error)
            if why is not None and not self._closing.is_set():
                self._wait_for_replacement(channel, self._broken or why)
        if self.lost is not None and not self._closing.is_set():
            self._on_message(Heartbeat())  # wakes a waiting thread, which then checks `lost`

    def _read(self, channel: Channel) -> str | None:
        """Pass on messages and send heartbeats until the connection ends; return why, or None if it was replaced."""
        reader = FrameReader(decode_control)
        buffer = memoryview(bytearray(READ_BYTES))
        poll = select.poll()
        poll.register(channel.fileno(), select.POLLIN)
        clock = AwakeClock(time.monotonic())
        received_at, beat_at = clock.tick(time.monotonic()), -math.inf
        while not self._closing.is_set() and self._channel is channel and self.lost is None:
            woke_at = time.monotonic()
            now = clock.tick(woke_at)
            if woke_at - beat_at >= self._heartbeat_s:  # on a busy machine the clock of `now` hardly moves
                beat_at = woke_at
                self.send(Heartbeat())
            try:
                count = channel.recv_into(buffer)
            except BlockingIOError:
                if now - received_at > self._timeout_s and not clock.was_late:
                    self._replace(f"no message for {now - received_at:.1f} s")
                poll.poll((RETRY_S if self.reconnecting else min(self._heartbeat_s, LATE_S) / 2) * 1e3)
                continue
            if not count:
                return "it closed"
            received_at, self.reconnecting = now, None
            for message in reader.feed(buffer[:count]):
                self._close_retired()
                self._on_message(message)
        return None

    def _wait_for_replacement(self, channel: Channel, why: str) -> None:
        """Replace a connection that has ended, unless that has happened meanwhile."""
        with self._lock:
            if self._channel is not channel:
                return
            self._connected.clear()
        if self._reconnection is None or self.greeting is None:
            self._lose(f"the connection to the scheduler was lost: {why}")
            return
        while not self._connected.is_set() and not self._closing.is_set():
            self._replace(why)  # again, because the thread of an earlier replacement may have been about to end
            self._connected.wait(RETRY_S)

    def _lose(self, why: str) -> None:
        self.lost = why
        self._connected.set()

    def _replace(self, why: str) -> None:
        """Let another thread connect, if none does."""
        self.reconnecting = why
        if self._replacement is None or not self._replacement.is_alive():
            self._replacement = threading.Thread(target=self._connect_again, name="echelon-reconnect", daemon=True)
            self._replacement.start()

    def _is_suspect(self) -> bool:
        """Whether the connection has ended or is silent."""
        return not self._closing.is_set() and (self.reconnecting is not None or not self._connected.is_set())

    def _connect_again(self) -> None:
        """Connect and send the greeting. If it does not succeed in time, the connection is lost for good."""
        assert self._reconnection is not None
        again = self._reconnection
        deadline = Deadline(again.who, again.give_up_s, again.job.stall_seconds)
        while self._is_suspect():
            why = self.reconnecting
            try:
                channel = again.connect(min(CONNECT_S, deadline.left_s))
                if self._is_suspect():
                    self._greet(channel)
                else:
                    channel.close()  # the scheduler was only slow
                return
            except ConnectionRefused as error:
                self._lose(f"the connection to the scheduler at {again.address} was lost: {why}; {error}")
                return
            except OSError as error:
                last = str(error)
            about = f"the scheduler at {again.address} (the connection was lost: {why}; {last})"
            if deadline.expired:
                self._lose(f"no connection to {about} for {again.give_up_s:g} s")
                return
            deadline.report(lambda: about, setting="")  # noqa: B023  (called at once)
            self._closing.wait(RETRY_S)

    def _greet(self, channel: Channel) -> None:
        """Send the greeting and use the channel from now on. Raises OSError."""
        assert self.greeting is not None
        with self.greeting() as message, self._lock:
            try:
                send_all(channel, frame(message), SEND_S)
            except OSError:
                channel.close()
                raise
            self._retired.append(self._channel)
            self._channel = channel
            self._broken = self.reconnecting = None
            self._connected.set()
        self.on_returned()

    def _close_retired(self) -> None:
        while self._retired:
            self._retired.pop().close()
