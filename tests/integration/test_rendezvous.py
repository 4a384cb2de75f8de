"""What a process prints while it waits for the other members of its process group, and its error at the timeout."""

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
from ports import free_port

WAITS = r" \(pid \d+\) has waited (\d\.\d) s for "
LIMIT = r", and waits up to 1 s \(ECHELON_TIMEOUT\)"


def error_and_lines(capfd: pytest.CaptureFixture[str], **job: Any) -> tuple[str, list[str]]:
    """Return the error of a worker that waits for one second, and the lines it printed."""
    with pytest.raises(JobError) as caught:
        create("dist_sync", job=Job(timeout_s=1.0, stall_seconds=0.2, **job))
    return str(caught.value), capfd.readouterr().err.splitlines()


def check_lines(lines: list[str], form: str) -> None:
    """Check that there is one line every 0.2 s and nothing else, in particular no warnings of torch."""
    found = [re.fullmatch(form, line) for line in lines]
    waited = [float(line[1]) for line in found if line is not None]
    assert len(waited) == len(lines), lines
    assert 2 <= len(waited) <= 4
    assert 0.2 <= waited[0] <= waited[1]


def test_rank_0_names_all_missing_members(capfd: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    error, lines = error_and_lines(capfd, scheduler_port=port, num_workers=3, rank=0)
    assert error == f"worker 0: worker 1, worker 2 did not arrive at 127.0.0.1:{port} in 1 s"
    check_lines(lines, f"worker 0{WAITS}worker 1, worker 2 to arrive at 127.0.0.1:{port}{LIMIT}")


def test_a_member_waits_for_a_host_that_does_not_listen(capfd: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    error, lines = error_and_lines(capfd, scheduler_port=port, num_workers=2, rank=1)
    host = rf"worker 0, which hosts the rendezvous at 127.0.0.1:{port} \(.*refused\)"
    assert re.fullmatch(rf"worker 1: cannot connect to {host}", error)
    check_lines(lines, f"worker 1{WAITS}{host}{LIMIT}")


def test_a_member_waits_for_a_host_that_listens_but_does_not_answer(capfd: pytest.CaptureFixture[str]) -> None:
    """This happens under a launcher, which binds the socket. Torch alone would wait forever."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        error, lines = error_and_lines(capfd, scheduler_port=port, num_workers=2, rank=1)
        (opening,) = [thread for thread in threading.enumerate() if thread.name == "echelon-rendezvous"]
    opening.join()  # it ends because nobody listens any more
    why = "it listens, but has not answered in 1 s"
    assert error == f"worker 1: cannot connect to worker 0, which hosts the rendezvous at 127.0.0.1:{port} ({why})"
    check_lines(lines, f"worker 1{WAITS}worker 0, which hosts the rendezvous at 127.0.0.1:{port}{LIMIT}")


def test_a_waiting_member_continues_when_the_last_one_arrives(capfd: pytest.CaptureFixture[str]) -> None:
    port = free_port()

    def work(rank: int) -> list[int]:
        job = Job(scheduler_port=port, num_workers=2, rank=rank, timeout_s=60.0, stall_seconds=0.1)
        with create("dist_sync", job=job) as kv:
            kv.barrier()
            return kv.workers

    for first in (0, 1):
        waiting = Fork(work, first)
        until(lambda first=first: f"worker {first} (pid" in capfd.readouterr().err, "a report of the wait")  # type: ignore[misc]
        other = Fork(work, 1 - first)
        assert waiting.result() == other.result() == [0, 1]
