"""What a process says while it waits for the others of its group, and when it gives up."""

from __future__ import annotations

import re
import socket
import threading
from typing import Any

import pytest

from echelon.environment import Job
from echelon.errors import JobError
from echelon.kvstore import create
from forked import Fork
from jobs import until

WAITS = r" \(pid \d+\) has waited (\d\.\d) s for "
LIMIT = r", and waits up to 1 s \(ECHELON_TIMEOUT\)"


def error_and_lines(capfd: pytest.CaptureFixture[str], **job: Any) -> tuple[str, list[str]]:
    """How a worker's wait of a second ends, and what it said meanwhile."""
    with pytest.raises(JobError) as caught:
        create("dist_sync", job=Job(timeout_s=1.0, stall_seconds=0.2, **job))
    return str(caught.value), capfd.readouterr().err.splitlines()


def check_lines(lines: list[str], form: str) -> None:
    """A line every 0.2 s, and nothing else: not torch's pages."""
    found = [re.fullmatch(form, line) for line in lines]
    waited = [float(line[1]) for line in found if line is not None]
    assert len(waited) == len(lines), lines
    assert 2 <= len(waited) <= 4
    assert 0.2 <= waited[0] <= waited[1]


def test_the_first_names_all_that_are_missing(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    error, lines = error_and_lines(capfd, scheduler_port=port, num_workers=3, rank=0)
    assert error == f"worker 0: worker 1, worker 2 did not come to 127.0.0.1:{port} in 1 s"
    check_lines(lines, f"worker 0{WAITS}worker 1, worker 2 to come to 127.0.0.1:{port}{LIMIT}")


def test_others_wait_for_a_host_that_does_not_listen(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    error, lines = error_and_lines(capfd, scheduler_port=port, num_workers=2, rank=1)
    assert re.fullmatch(rf"worker 1: worker 0, who hosts the meeting, is not at 127.0.0.1:{port} \(.*refused\)", error)
    host = rf"worker 0, who hosts the meeting at 127.0.0.1:{port} \(.*refused\)"
    check_lines(lines, f"worker 1{WAITS}{host}{LIMIT}")


def test_others_wait_for_a_host_that_listens_and_is_busy(capfd: pytest.CaptureFixture[str]) -> None:
    """As under a launcher, which binds the socket: torch alone would wait for ever."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        error, lines = error_and_lines(capfd, scheduler_port=port, num_workers=2, rank=1)
        (opening,) = [thread for thread in threading.enumerate() if thread.name == "echelon-meeting"]
    opening.join()  # it hears that nobody listens any more
    why = "it listens, but has not answered in 1 s"
    assert error == f"worker 1: worker 0, who hosts the meeting, is not at 127.0.0.1:{port} ({why})"
    check_lines(lines, f"worker 1{WAITS}worker 0, who hosts the meeting at 127.0.0.1:{port}{LIMIT}")


def test_who_has_waited_goes_on_when_the_last_has_come(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def work(rank: int) -> list[int]:
        job = Job(scheduler_port=port, num_workers=2, rank=rank, timeout_s=60.0, stall_seconds=0.1)
        with create("dist_sync", job=job) as kv:
            kv.barrier()
            return kv.workers

    for first in (0, 1):
        waiting = Fork(work, first)
        until(lambda first=first: f"worker {first} (pid" in capfd.readouterr().err, "a line of who waits")  # type: ignore[misc]
        other = Fork(work, 1 - first)
        assert waiting.result() == other.result() == [0, 1]
