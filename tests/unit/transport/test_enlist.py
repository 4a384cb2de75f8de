"""What a process says while it joins."""

from __future__ import annotations

import socket
import threading

import pytest

from echelon.environment import Job
from echelon.errors import JobError
from echelon.scheduler.serve import serve
from echelon.transport.enlist import enlist
from echelon.transport.in_process import InProcessTransport


@pytest.mark.parametrize(("verbose", "joined", "hears"), [(0, False, False), (1, True, False), (2, True, True)])
def test_ps_verbose(capsys: pytest.CaptureFixture[str], verbose: int, joined: bool, hears: bool) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    job = Job(scheduler_port=listener.getsockname()[1], num_workers=1, num_servers=0, verbose=verbose, timeout_s=30.0)
    scheduler = threading.Thread(target=serve, args=(job, listener))
    scheduler.start()
    with enlist(job, "worker", InProcessTransport()) as post:
        assert post.rank == 0
    scheduler.join()
    said = capsys.readouterr().err
    assert ("worker 0 at 127.0.0.1 joined the job of 127.0.0.1:" in said) == joined
    assert ("hears Roster" in said) == hears


def test_who_waits_for_a_scheduler_that_does_not_answer_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]  # of nobody, when it is closed
    job = Job(scheduler_port=port, rank=3, num_workers=4, timeout_s=0.5, stall_seconds=0.3)
    with pytest.raises(JobError, match=f"no scheduler at 127.0.0.1:{port} after 0.5 s"):
        enlist(job, "worker", InProcessTransport()).__enter__()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("worker 3 (pid ")
    assert f") has waited 0.3 s for the scheduler at 127.0.0.1:{port} (" in line
    assert line.endswith("), and waits up to 0.5 s (ECHELON_TIMEOUT)")
