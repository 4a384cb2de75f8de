"""Control connections: length-prefixed messages between the scheduler and every other process.

The kernel closes the sockets of a killed process, so the scheduler detects a death at once and without false alarms.
Heartbeats are only needed for machines that disappear without closing their connections.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections.abc import Callable

from echelon.cluster.messages import ControlMessage, Heartbeat, Malformed, decode_control, encode
from echelon.environment import Job
from echelon.errors import JobError
from echelon.transport.admission import connect
from echelon.transport.channel import Channel, send_all
from echelon.transport.credentials import Security
from echelon.transport.framing import FrameReader, with_length

HEARTBEAT_S = 1.0
READ_BYTES = 64 << 10  # received at once: at least a TLS record, so that none is received in parts
SEND_S = 5.0
CONNECT_S = 5.0


def frame(message: ControlMessage) -> bytes:
    """Return a message's bytes, preceded by their length."""
    return with_length(encode(message))


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

    def report(self, what: Callable[[], str]) -> None:
        """Print what this process waits for, if a report is due."""
        now = time.monotonic()
        if now < self._next_report:
            return
        self._next_report += self._stall_seconds
        waited = f"{self._who} (pid {os.getpid()}) has waited {now - self._began:.1f} s for {what()}"
        print(f"{waited}, and waits up to {self._timeout_s:g} s (ECHELON_TIMEOUT)", file=sys.stderr, flush=True)


def connect_to_scheduler(job: Job, timeout_s: float, who: str) -> Channel:
    """Connect to the scheduler, which may not have started yet. `who` names this process in reports of the wait."""
    host, port = job.scheduler_host, job.scheduler_port
    security = Security.of(job)
    deadline = Deadline(who, timeout_s, job.stall_seconds)
    while True:
        try:
            return connect((host, port), security, min(CONNECT_S, deadline.left_s))
        except OSError as error:
            if deadline.expired:
                raise JobError(
                    f"no scheduler at {host}:{port} after {timeout_s:g} s ({error}); is it running, and are "
                    "DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT correct?"
                ) from error
            why = str(error)
            deadline.report(lambda: f"the scheduler at {host}:{port} ({why})")  # noqa: B023  (called at once)
            time.sleep(0.05)


class ControlClient:
    """One process's connection to the scheduler. A thread reads it, sends heartbeats and passes messages on.

    When the connection is lost, `lost` says why.
    """

    def __init__(self, channel: Channel, on_message: Callable[[ControlMessage], None]) -> None:
        self._channel = channel
        self._on_message = on_message
        self._lock = threading.Lock()
        self._closed = False
        self._last_heartbeat = 0.0
        self.lost: str | None = None
        self._thread = threading.Thread(target=self._read, name="echelon-control", daemon=True)
        self._thread.start()

    def send(self, message: ControlMessage) -> None:
        """Send a message. If the connection is broken, the reading thread reports it."""
        with self._lock:
            try:
                send_all(self._channel, frame(message), SEND_S)
            except OSError as error:
                self.lost = self.lost or f"the connection to the scheduler was lost: {error}"

    def close(self) -> None:
        """Close the connection and stop the thread."""
        self._closed = True
        self._channel.shutdown()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._channel.close()

    def _read(self) -> None:
        reader = FrameReader(decode_control)
        buffer = memoryview(bytearray(READ_BYTES))
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN)
        try:
            while not self._closed:
                try:
                    count = self._channel.recv_into(buffer)
                except BlockingIOError:
                    if not poll.poll(HEARTBEAT_S * 1e3):
                        self.send(Heartbeat())
                    continue
                if not count:
                    break
                for message in reader.feed(buffer[:count]):
                    self._on_message(message)
                self._send_heartbeat_if_due()
        except (OSError, Malformed) as error:
            self.lost = self.lost or f"the connection to the scheduler was lost: {error}"
        if not self._closed:
            self.lost = self.lost or "the connection to the scheduler was lost: it closed"
            self._on_message(Heartbeat())  # wakes a waiting thread, which then checks `lost`

    def _send_heartbeat_if_due(self) -> None:
        now = time.monotonic()
        if now - self._last_heartbeat >= HEARTBEAT_S:
            self._last_heartbeat = now
            self.send(Heartbeat())
