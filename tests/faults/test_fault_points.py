"""Faults by environment, in the processes of a real job: each one happens, and every gradient is applied once."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.testing.faults import Fault, Kind, check_fired, faults_in, partition
from jobs import Job, Plan

FAULTS = [
    Fault(Kind.DROP, "server", 0, 1, "receive.Push"),
    Fault(Kind.DUPLICATE, "worker", 1, 2, "send.Push"),
    Fault(Kind.REORDER, "worker", 0, 2, "send.Push"),
    Fault(Kind.DELAY, "server", 1, None, "send.Done", after=9, seconds=0.2),
    Fault(Kind.DUPLICATE, "server", 0, None, "send.Done", after=10),
    Fault(Kind.DROP, "worker", 1, 3, "answer.Pull"),
    Fault(Kind.STOP, "server", 1, 4, "server.applied", seconds=0.3),
    Fault(Kind.STOP, "scheduler", 0, None, "scheduler.Barrier", seconds=0.3),
    Fault(Kind.SLOW, "worker", 1, 4, "worker.push", seconds=0.2, bytes_per_s=5e6),
    *partition(["worker 0"], ["server 1"], 0.5, point="worker.sent", clock=5),
]


@pytest.mark.parametrize(
    ("store", "transport"),
    [pytest.param("dist_sync", "tcp", id="sync-tcp"), pytest.param("dist_async", "shm", marks=pytest.mark.long)],
)
def test_faults_happen_in_real_processes_and_change_no_result(tmp_path: Path, store: str, transport: str) -> None:
    plan = Plan(store, 2)
    options = ("--transport", transport)
    with Job(tmp_path, plan, num_servers=2, options=options, environment=faults_in(FAULTS)) as job:
        assert job.wait() == 0, job.out
    check_fired(job.run, FAULTS)
    assert [result["table"] for result in job.results().values()] == [plan.table()] * 2
