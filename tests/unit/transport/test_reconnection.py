"""A process whose scheduler closes the connection or is silent connects again, and says who it is."""

from __future__ import annotations

import queue
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field

import pytest

from echelon.cluster.messages import Barrier, BarrierDone, ControlMessage, Heartbeat, Register, decode_control
from echelon.environment import Job
from echelon.transport.admission.channel import Channel, PlainChannel
from echelon.transport.control import ControlClient, Reconnection, frame
from echelon.transport.framing import FrameReader

SILENT_S = 0.4
GREETING = Register("worker", 0, "host", 1, "", "token")
JOB = Job(scheduler_host="somewhere", scheduler_port=9, heartbeat_timeout_s=SILENT_S, stall_seconds=0.2)


class OtherSide:
    """The scheduler's side of a connection."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._messages = self._read()
        connected.settimeout(10.0)

    def _read(self) -> Iterator[ControlMessage]:
        reader = FrameReader(decode_control)
        while data := self.socket.recv(4096):
            yield from reader.feed(memoryview(data))

    def receive(self) -> ControlMessage | None:
        """Return the next message that is not a heartbeat; None: the other side has closed the connection."""
        return next((message for message in self._messages if message != Heartbeat()), None)

    def send(self, message: ControlMessage) -> None:
        self.socket.sendall(frame(message))


@dataclass(frozen=True, slots=True)
class Pairs(Reconnection):
    """Connects to the test instead of a scheduler."""

    others: queue.SimpleQueue[OtherSide] = field(default_factory=queue.SimpleQueue)

    def connect(self, timeout_s: float) -> Channel:
        own, other = socket.socketpair()
        self.others.put(OtherSide(other))
        return PlainChannel(own)

    def close(self) -> None:
        """Close the connections that no test has used."""
        while not self.others.empty():
            self.others.get().socket.close()


@dataclass(frozen=True, slots=True)
class Unreachable(Reconnection):
    """Never connects."""

    def connect(self, timeout_s: float) -> Channel:
        raise ConnectionRefusedError("nobody listens")


Start = Callable[[Reconnection], tuple[ControlClient, OtherSide]]


@pytest.fixture
def messages() -> queue.SimpleQueue[ControlMessage]:
    return queue.SimpleQueue()


@pytest.fixture
def start(messages: queue.SimpleQueue[ControlMessage]) -> Iterator[Start]:
    with ExitStack() as stack:

        def start_client(again: Reconnection) -> tuple[ControlClient, OtherSide]:
            own, other = socket.socketpair()
            if isinstance(again, Pairs):
                stack.callback(again.close)
            client = ControlClient(PlainChannel(own), messages.put, SILENT_S, again, lambda: nullcontext(GREETING))
            stack.callback(client.close)
            stack.enter_context(other)
            return client, OtherSide(other)

        yield start_client


def test_a_closed_connection_is_replaced(start: Start, messages: queue.SimpleQueue[ControlMessage]) -> None:
    again = Pairs("worker 0", JOB)
    returned = threading.Event()
    client, first = start(again)
    client.on_returned = returned.set
    first.socket.shutdown(socket.SHUT_RDWR)
    second = again.others.get(timeout=10.0)
    with second.socket:
        assert second.receive() == GREETING
        assert returned.wait(10.0)
        client.send(Barrier(1))
        assert second.receive() == Barrier(1)
        second.send(BarrierDone(1))
        assert messages.get(timeout=10.0) == BarrierDone(1)
        assert (client.lost, client.reconnecting) == (None, None)


def test_a_silent_connection_is_used_until_the_scheduler_answers_on_another_one(start: Start) -> None:
    """If the process closed it before, the scheduler would take it for dead."""
    again = Pairs("worker 0", JOB)
    _, first = start(again)
    second = again.others.get(timeout=10.0)
    with second.socket:
        assert second.receive() == GREETING
        first.socket.settimeout(SILENT_S)
        with pytest.raises(TimeoutError):
            first.receive()  # it is open
        second.send(Heartbeat())
        first.socket.settimeout(10.0)
        first._messages = first._read()
        assert first.receive() is None, "it is closed"


def test_a_scheduler_that_sends_heartbeats_keeps_its_connection(start: Start) -> None:
    again = Pairs("worker 0", JOB)
    _, first = start(again)
    reader, num_beats = FrameReader(decode_control), 0
    while num_beats < 10:  # each is sent a third of the timeout after the last one
        num_beats += len(list(reader.feed(memoryview(first.socket.recv(4096)))))
        first.send(Heartbeat())
    assert again.others.empty()


def test_a_process_gives_up_with_a_reason_and_says_that_it_waits(
    start: Start, messages: queue.SimpleQueue[ControlMessage], capsys: pytest.CaptureFixture[str]
) -> None:
    client, first = start(Unreachable("worker 0", JOB, give_up_s=1.0))
    first.socket.shutdown(socket.SHUT_RDWR)
    assert messages.get(timeout=10.0) == Heartbeat(), "a thread that waits is woken"
    lost = r"the connection was lost: (it closed|\[Errno 32\] Broken pipe)"
    why = rf"the scheduler at somewhere:9 \({lost}; nobody listens\)"
    assert re.fullmatch(f"no connection to {why} for 1 s", client.lost or "")
    assert not client.wait_until_connected(10.0)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 2
    for line in lines:
        assert re.fullmatch(rf"worker 0 \(pid \d+\) has waited \d\.\d s for {why}, and waits up to 1 s", line)


def test_a_message_without_a_connection_is_dropped(start: Start) -> None:
    """The greeting says what the scheduler has to know. A repeated message would be forbidden."""
    again = Pairs("worker 0", JOB)
    client, first = start(again)
    release = threading.Event()

    @contextmanager
    def greet_later() -> Iterator[ControlMessage]:
        release.wait(10.0)
        yield GREETING

    client.greeting = greet_later
    first.socket.shutdown(socket.SHUT_RDWR)
    second = again.others.get(timeout=10.0)
    with second.socket:
        client.send(Barrier(1))
        release.set()
        assert second.receive() == GREETING
        assert client.wait_until_connected(10.0)
        client.send(Barrier(2))
        assert second.receive() == Barrier(2)
