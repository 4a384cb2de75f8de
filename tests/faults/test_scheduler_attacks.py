"""Connections that flood, do not read, stay idle or stay open, and a pause: the scheduler goes on for the others."""

from __future__ import annotations

import os
import queue
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import TypeVar

import pytest

from echelon.cluster.messages import (
    Barrier,
    BarrierDone,
    ControlMessage,
    Heartbeat,
    Leave,
    Register,
    Roster,
    StoreOpened,
)
from echelon.environment import Job
from echelon.transport.admission.admission import connect
from echelon.transport.admission.channel import Channel, send_all
from echelon.transport.admission.credentials import Security
from echelon.transport.control import ControlClient, connect_to_scheduler, frame

FILES = 400  # that the scheduler may open
SILENT_S = 1.5  # after which a process counts as dead
M = TypeVar("M", bound=ControlMessage)


class Member:
    """A worker of the job as the scheduler sees it."""

    def __init__(self, job: Job, rank: int) -> None:
        self.messages: queue.SimpleQueue[ControlMessage] = queue.SimpleQueue()
        channel = connect_to_scheduler(job, 30.0, f"worker {rank}")
        self.control = ControlClient(channel, self.messages.put, job.heartbeat_timeout_s)
        self.control.send(Register("worker", rank, "127.0.0.1", 1, ""))
        self.control.send(StoreOpened(0))

    def wait_for(self, kind: type[M]) -> M:
        while True:
            message = self.messages.get(timeout=10.0)
            assert self.control.lost is None, self.control.lost
            if isinstance(message, kind):
                return message


class Scheduler:
    """A scheduler's process with two workers."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.job = Job(scheduler_port=listener.getsockname()[1], num_workers=2, heartbeat_timeout_s=SILENT_S)
            variables = self.job.to_environment() | {"DMLC_ROLE": "scheduler"}
            self.process = subprocess.Popen(
                [sys.executable, "-m", "echelon.scheduler"],
                env={**os.environ, **variables, "ECHELON_LISTEN_FD": str(listener.fileno())},
                pass_fds=[listener.fileno()],
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES)),
            )
        self._barriers = 0
        self.members = [Member(self.job, rank) for rank in range(2)]
        for member in self.members:
            member.wait_for(Roster)

    def connect(self) -> Channel:
        """Return a connection of a process that has the credentials, but is not a member."""
        return connect((self.job.scheduler_host, self.job.scheduler_port), Security.of(self.job), 10.0)

    def barrier(self) -> float:
        """Let the members pass a barrier, and return how many seconds it took."""
        began = time.monotonic()
        self._barriers += 1
        for member in self.members:
            member.control.send(Barrier(self._barriers))
        for member in self.members:
            member.wait_for(BarrierDone)
        return time.monotonic() - began

    def close(self) -> None:
        for member in self.members:
            member.control.close()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    with closing(Scheduler()) as one:
        yield one


def test_more_idle_connections_than_files(scheduler: Scheduler) -> None:
    address = scheduler.job.scheduler_host, scheduler.job.scheduler_port
    with ExitStack() as stack:
        for _ in range(2 * FILES):
            stack.enter_context(socket.create_connection(address))
        scheduler.barrier()
        for _ in range(FILES):
            with suppress(OSError):  # the scheduler has no file left for it
                stack.enter_context(closing(scheduler.connect()))
        scheduler.barrier()
    assert scheduler.process.poll() is None


def flood(channel: Channel, message: ControlMessage, stop: threading.Event) -> None:
    """Send a message without end, and read nothing, until the connection ends."""
    data = frame(message) * 1000
    with suppress(OSError):
        while not stop.is_set():
            send_all(channel, data, 5.0)


@contextmanager
def floods(scheduler: Scheduler, message: ControlMessage) -> Iterator[list[threading.Thread]]:
    """Let four connections send a message without end. Yield their threads."""
    stop = threading.Event()
    with ExitStack() as stack:
        channels = [stack.enter_context(closing(scheduler.connect())) for _ in range(4)]
        threads = [threading.Thread(target=flood, args=(channel, message, stop)) for channel in channels]
        for thread in threads:
            thread.start()
        yield threads
        stop.set()
        for thread in threads:
            thread.join()


def test_connections_that_send_without_end(scheduler: Scheduler) -> None:
    with floods(scheduler, Heartbeat()):
        assert max(scheduler.barrier() for _ in range(50)) < 1.0
    assert scheduler.process.poll() is None


def test_connections_that_do_not_read_their_answers_are_ended(scheduler: Scheduler) -> None:
    """The answers, which repeat the role, fill the buffers of the kernel and then the scheduler's queue."""
    with floods(scheduler, Register("x" * 300, None, "", 1, "")) as threads:
        began, slowest = time.monotonic(), 0.0
        while any(thread.is_alive() for thread in threads) and time.monotonic() < began + 20:
            slowest = max(slowest, scheduler.barrier())
        assert not any(thread.is_alive() for thread in threads)
    assert slowest < 1.0
    assert scheduler.process.poll() is None


def test_a_paused_scheduler_reads_before_it_judges(scheduler: Scheduler) -> None:
    os.kill(scheduler.process.pid, signal.SIGSTOP)
    time.sleep(2 * SILENT_S)  # the pause itself
    os.kill(scheduler.process.pid, signal.SIGCONT)
    scheduler.barrier()


@pytest.mark.parametrize("keeps_sending", [False, True], ids=["idle", "alive"])
def test_a_connection_that_stays_open_does_not_delay_the_end(scheduler: Scheduler, keeps_sending: bool) -> None:
    ignore: Callable[[ControlMessage], None] = lambda message: None  # noqa: E731
    lingering = scheduler.connect()
    with closing(ControlClient(lingering, ignore, SILENT_S) if keeps_sending else lingering):
        for member in scheduler.members:
            member.control.send(Leave("it finished"))
            member.control.close()
        assert scheduler.process.wait(10.0) == 0
