"""What a process prints while it joins a job, and what happens when it joins a job that it has left."""

from __future__ import annotations

import re
import socket
import threading
from contextlib import closing

import pytest

from echelon.cluster.messages import ServersUnused
from echelon.environment import Job
from echelon.errors import JobError
from echelon.scheduler import serve
from echelon.transport.admission.admission import connect
from echelon.transport.admission.channel import send_all
from echelon.transport.admission.credentials import Security
from echelon.transport.control import frame
from echelon.transport.in_process import InProcessTransport
from echelon.transport.registration import DepartedJobs, register


@pytest.mark.parametrize(
    ("verbose", "prints_members", "prints_messages"), [(0, False, False), (1, True, False), (2, True, True)]
)
def test_ps_verbose(
    capsys: pytest.CaptureFixture[str], verbose: int, prints_members: bool, prints_messages: bool
) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    job = Job(scheduler_port=listener.getsockname()[1], num_workers=1, num_servers=0, verbose=verbose, timeout_s=30.0)
    scheduler = threading.Thread(target=serve, args=(job, listener))
    scheduler.start()
    with register(job, "worker", InProcessTransport()) as registration:
        assert registration.rank == 0
    scheduler.join()
    printed = capsys.readouterr().err
    assert ("worker 0 at 127.0.0.1 joined the job of 127.0.0.1:" in printed) == prints_members
    assert ("received Roster" in printed) == prints_messages


def test_a_process_that_waits_for_the_scheduler_reports_it(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]  # nobody listens there after this block
    job = Job(scheduler_port=port, rank=3, num_workers=4, timeout_s=2.0, stall_seconds=0.1)
    with pytest.raises(JobError, match=f"no scheduler at 127.0.0.1:{port} after 2 s"):
        register(job, "worker", InProcessTransport(), DepartedJobs()).__enter__()
    first, second, *_ = capsys.readouterr().err.splitlines()
    form = rf"worker 3 \(pid \d+\) has waited (\d\.\d) s for the scheduler at 127\.0\.0\.1:{port} \(.*\)"
    form += r", and waits up to 2 s \(ECHELON_TIMEOUT\)"
    waited = [float(found[1]) for line in (first, second) if (found := re.fullmatch(form, line))]
    assert len(waited) == 2
    assert 0.1 <= waited[0] <= waited[1] <= 2


def test_idle_servers_do_not_give_up_while_a_worker_trains_without_them(capfd: pytest.CaptureFixture[str]) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    job = Job(scheduler_port=port, num_workers=1, num_servers=1, timeout_s=1.0, stall_seconds=0.1)
    statuses: dict[str, int] = {}

    def serve_as_server() -> None:
        with pytest.raises(SystemExit) as ended:
            register(job, "server", InProcessTransport(), DepartedJobs()).__enter__()
        statuses["server"] = int(ended.value.code or 0)

    threads = [
        threading.Thread(target=lambda: statuses.update(scheduler=serve(job, listener))),
        threading.Thread(target=serve_as_server),
    ]
    threads[0].start()
    with closing(connect(("127.0.0.1", port), Security.of(job), 10.0)) as worker:
        send_all(worker, frame(ServersUnused("nccl")), 10.0)
        threads[1].start()
        threads[0].join(2 * job.timeout_s)
        assert all(thread.is_alive() for thread in threads), statuses
    for thread in threads:
        thread.join()
    assert statuses == {"scheduler": 0, "server": 0}
    assert (
        capfd.readouterr().err
        == "nccl runs without servers: it does not use the 1 server of this job (-s 0 starts none)\n"
    )


def test_a_job_that_another_thread_leaves_during_a_join_stays_departed() -> None:
    job = Job(scheduler_host="somewhere", scheduler_port=1)
    departed = DepartedJobs()
    with departed.joining(job) as timeout_s:
        assert timeout_s == job.timeout_s
        departed.add(job)
    assert job in departed
    with departed.joining(job) as timeout_s:
        assert timeout_s == 0
    assert job not in departed, "a new job has the address"
