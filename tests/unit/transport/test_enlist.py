"""What a process says while it joins."""

from __future__ import annotations

import re
import socket
import threading

import pytest

from echelon.environment import Job
from echelon.errors import JobError
from echelon.scheduler.serve import serve
from echelon.transport.enlist import _joining_once, _left, enlist
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
    _left.discard(("127.0.0.1", port))  # the system may hand out a port that an earlier test's job had
    job = Job(scheduler_port=port, rank=3, num_workers=4, timeout_s=2.0, stall_seconds=0.1)
    with pytest.raises(JobError, match=f"no scheduler at 127.0.0.1:{port} after 2 s"):
        enlist(job, "worker", InProcessTransport()).__enter__()
    first, second, *_ = capsys.readouterr().err.splitlines()
    form = rf"worker 3 \(pid \d+\) has waited (\d\.\d) s for the scheduler at 127\.0\.0\.1:{port} \(.*\)"
    form += r", and waits up to 2 s \(ECHELON_TIMEOUT\)"
    waited = [float(found[1]) for line in (first, second) if (found := re.fullmatch(form, line))]
    assert len(waited) == 2
    assert 0.1 <= waited[0] <= waited[1] <= 2


def test_what_another_thread_leaves_meanwhile_stays_left() -> None:
    job = Job(scheduler_host="somewhere", scheduler_port=1)
    where = (job.scheduler_host, job.scheduler_port)
    try:
        with _joining_once(job):
            _left.add(where)
        assert where in _left
        with _joining_once(job) as patience_s:
            assert patience_s == 0
        assert where not in _left, "a new job has the address"
    finally:
        _left.discard(where)
