"""SIGTERM to workers with plain loops over `trainer.samples`: they leave, or all stop, and no sample is lost."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from samples_outcome import PROGRAM, Outcome, check

from echelon.errors import NOT_WHOLE
from jobs import Job, until

SLOW = {"compute_s": dict.fromkeys("012", 0.05)}


def job_of(folder: Path, plan: dict[str, Any]) -> tuple[Job, Path]:
    out = folder / "out_files"
    out.mkdir(parents=True)
    command = [sys.executable, str(PROGRAM), json.dumps(plan | SLOW | {"out": str(out)})]
    return Job(folder, num_servers=2, num_workers=3, command=command, options=["--max-restarts", "1"]), out


def wait_for_steps(out: Path) -> None:
    def every_worker_has_trained() -> bool:
        return sum(len(file.read_text().splitlines()) > 4 for file in out.iterdir()) == 3

    until(every_worker_has_trained, "some steps of every worker", 60.0)


def after_loop(folder: Path, rank: int) -> list[Any]:
    found: list[Any] = json.loads((folder / f"after.{rank}").read_text())
    return found


@pytest.mark.parametrize(
    ("rank", "plan"),
    [
        pytest.param(0, {"store": "dist_sync", "after": "gather"}, id="the first worker, in lock-step"),
        pytest.param(2, {"store": "dist_async", "passes": True, "after": "trainer"}, id="asynchronous"),
        pytest.param(1, {"store": "dist_ssync", "staleness": 2, "loader": True}, id="with a DataLoader"),
    ],
)
def test_a_worker_that_gets_sigterm_leaves_and_the_others_train_its_samples(
    rank: int, plan: dict[str, Any], tmp_path: Path
) -> None:
    plan |= {"num_samples": 120, "batch_size": 4, "epochs": 2}
    job, out = job_of(tmp_path, plan)
    with job:
        wait_for_steps(out)
        os.kill(job.pid("worker", rank), signal.SIGTERM)
        assert job.wait() == 0, job.err
        partial = max(row["partial"] for row in job.events("epoch_trained"))
    assert "although" not in job.err, "no process has failed"
    assert f"worker {rank} leaves the job: SIGTERM; the other workers continue" in job.out
    outcome = Outcome(out, partial)
    check(outcome, 120, 2)
    assert (outcome.in_doubt, outcome.partial) == (set(), 0)
    assert len(outcome.steps) == 3, "no worker was started again"
    assert after_loop(tmp_path, rank)[:2] == ["SIGTERM", False]
    others = [after_loop(tmp_path, other)[0] for other in range(3) if other != rank]
    assert others == [None, None]


@pytest.mark.parametrize("store", ["dist_sync", pytest.param("dist_async", marks=pytest.mark.long)])
@pytest.mark.parametrize("to_launcher", [pytest.param(True, marks=pytest.mark.long), False])
def test_sigterm_to_all_workers_ends_all_loops_and_the_programs_go_on(
    store: str, to_launcher: bool, tmp_path: Path
) -> None:
    job, out = job_of(tmp_path, {"store": store, "num_samples": 4000, "batch_size": 4, "epochs": 2, "after": "gather"})
    with job:
        wait_for_steps(out)
        pids = [job.launcher.pid] if to_launcher else [job.pid("worker", rank) for rank in range(3)]
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        assert job.wait() == (128 + signal.SIGTERM if to_launcher else NOT_WHOLE), job.err
    outcome = Outcome(out, 0)
    assert not outcome.in_doubt, "every step was finished"
    assert max(outcome.ended.values()) == 1
    if store == "dist_sync":
        assert len(set(outcome.steps.values())) == 1, "all stopped after the same step"
    assert [after_loop(tmp_path, rank)[0] for rank in range(3)] == ["SIGTERM"] * 3
    if not to_launcher:
        assert "SIGTERM stopped all workers in epoch 0" in job.out + job.err
