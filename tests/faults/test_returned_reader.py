"""A worker that was stopped and removed returns, also if the scheduler cannot tell it yet that it was removed."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from samples_outcome import PROGRAM

from echelon.testing.history import check
from jobs import Job, until

SAMPLES = 160


def test_batches_that_a_returned_worker_has_read_ahead_are_not_trained_twice(tmp_path: Path) -> None:
    out = tmp_path / "out_files"
    out.mkdir()
    plan = {"store": "dist_async", "num_samples": SAMPLES, "batch_size": 2, "epochs": 1, "loader": True}
    plan |= {"compute_s": {"0": 0.25, "1": 0.25}, "out": str(out)}
    command = [sys.executable, str(PROGRAM), json.dumps(plan)]
    environment = {"ECHELON_HISTORY": "1", "PS_HEARTBEAT_TIMEOUT": "3"}
    with Job(tmp_path / "job", num_servers=1, num_workers=2, command=command, environment=environment) as job:
        until(lambda: any(row["who"] == "worker 1" for row in job.events("history_acked")), "a step of worker 1")
        pid = job.pid("worker", 1)
        os.kill(pid, signal.SIGSTOP)
        until(lambda: any(row["workers"] == [0] for row in job.events("view")), "worker 1 is removed")
        os.kill(pid, signal.SIGCONT)
        assert job.wait() == 0
        assert job.events("rejoined")
        assert check(job.run, num_samples=SAMPLES, all_named=True).problems == []


def test_a_removed_worker_that_returns_before_the_scheduler_is_back_joins_again(tmp_path: Path) -> None:
    """The servers refuse its push, and nobody says yet why. Its gradients are frames, which they do not read."""
    out = tmp_path / "out_files"
    out.mkdir()
    plan = {"store": "dist_async", "num_samples": SAMPLES, "batch_size": 2, "epochs": 1}
    plan |= {"compute_s": {"0": 0.25, "1": 0.05}, "out": str(out)}
    command = [sys.executable, str(PROGRAM), json.dumps(plan)]
    environment = {"ECHELON_HISTORY": "1", "PS_HEARTBEAT_TIMEOUT": "3"}
    options = ["--transport", "tcp"]
    folder = tmp_path / "job"
    with Job(folder, num_servers=1, num_workers=2, command=command, environment=environment, options=options) as job:
        until(lambda: any(row["who"] == "worker 1" for row in job.events("history_acked")), "a step of worker 1")
        pid, scheduler = job.pid("worker", 1), job.pid("scheduler", 0)
        os.kill(pid, signal.SIGSTOP)
        until(lambda: any(row["workers"] == [0] for row in job.events("view")), "worker 1 is removed")
        os.kill(scheduler, signal.SIGKILL)
        os.kill(pid, signal.SIGCONT)
        assert job.wait() == 0, job.out + job.err
        assert "the server ends the connection" not in job.out, "it is no malformed message"
        assert job.events("rejoined")
        assert check(job.run, num_samples=SAMPLES, all_named=True).problems == []
