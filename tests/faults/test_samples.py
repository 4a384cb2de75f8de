"""Each sample once per epoch with real processes: plain loops over `trainer.samples`, one of which is killed."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from samples_outcome import PROGRAM, Outcome, check

from jobs import Job, until

STORES: dict[str, dict[str, Any]] = {
    "dist_sync": {},
    "dist_async": {},
    "dist_ssync": {"staleness": 2},
    "dist_gsync": {"groups": [[0, 1], [2]]},
}
RELAXED = [pytest.param(store, marks=pytest.mark.long) for store in ("dist_ssync", "dist_gsync")]  # as dist_async


def leave_alone(job: Job, out: Path) -> None:
    """Do nothing to a job."""


def run_job(
    folder: Path, plan: dict[str, Any], *, restarts: int = 0, disturb: Callable[[Job, Path], None] = leave_alone
) -> Outcome:
    out = folder / "out_files"
    out.mkdir(parents=True)
    command = [sys.executable, str(PROGRAM), json.dumps(plan | {"out": str(out)})]
    options = ["--max-restarts", str(restarts)]
    with Job(folder, num_servers=2, num_workers=3, command=command, options=options) as job:
        disturb(job, out)
        status = job.wait()
        print(job.err[-3000:])
        assert status == 0
        partial = max((row["partial"] for row in job.events("epoch_trained")), default=0)
        return Outcome(out, partial)


@pytest.mark.parametrize("store", ["dist_sync", "dist_async", *RELAXED])
def test_each_sample_is_trained_once_per_epoch(store: str, tmp_path: Path) -> None:
    plan = {"store": store, **STORES[store], "num_samples": 101, "batch_size": 4, "epochs": 2, "compute_s": {"2": 0.01}}
    outcome = run_job(tmp_path, plan)
    check(outcome, 101, 2)
    assert not outcome.in_doubt
    assert outcome.partial == 0


@pytest.mark.parametrize("store", ["dist_sync", "dist_async", *RELAXED])
@pytest.mark.parametrize(
    "where", [pytest.param("before", marks=pytest.mark.long), "between", pytest.param("after", marks=pytest.mark.long)]
)
def test_others_train_the_samples_of_a_killed_worker(store: str, where: str, tmp_path: Path) -> None:
    plan = {"store": store, **STORES[store], "num_samples": 120, "batch_size": 4, "epochs": 2}
    outcome = run_job(tmp_path, plan | {"kill": {"rank": 1, "step": 3, "where": where}})
    check(outcome, 120, 2)
    assert len(outcome.in_doubt) == (0 if where == "after" else 4)
    assert outcome.partial == (where == "between")
    if where != "after":
        assert all(outcome.ended[one] == 1 for one in outcome.in_doubt), "the step that was not applied is made again"


@pytest.mark.parametrize("store", ["dist_sync", pytest.param("dist_ssync", marks=pytest.mark.long)])
def test_a_worker_that_is_started_again_gets_samples(store: str, tmp_path: Path) -> None:
    plan = {"store": store, **STORES[store], "num_samples": 400, "batch_size": 4, "epochs": 2}
    plan |= {"kill": {"rank": 1, "step": 3, "where": "between"}, "waits_at": 8, "num_workers": 3}
    plan |= {"compute_s": {"0": 0.02, "2": 0.02}, "lazy_pull": True}
    outcome = run_job(tmp_path, plan, restarts=1)
    check(outcome, 400, 2)
    again = [steps for name, steps in outcome.steps.items() if name.startswith("1.")]
    assert len(again) == 2
    assert min(again) >= 3, "both processes of worker 1 have trained"
    assert outcome.partial == 1


@pytest.mark.parametrize("store", ["dist_sync", pytest.param("dist_async", marks=pytest.mark.long)])
def test_samples_are_exact_when_the_scheduler_is_killed(store: str, tmp_path: Path) -> None:
    def kill_scheduler(job: Job, out: Path) -> None:
        until(lambda: sum(len(file.read_text().splitlines()) for file in out.iterdir()) > 30, "some steps", 60.0)
        os.kill(job.pid("scheduler", 0), signal.SIGKILL)

    plan = {"store": store, "num_samples": 400, "batch_size": 4, "epochs": 2}
    plan["compute_s"] = dict.fromkeys("012", 0.05)
    outcome = run_job(tmp_path, plan, restarts=1, disturb=kill_scheduler)
    check(outcome, 400, 2)
    assert not outcome.in_doubt
    assert outcome.partial == 0


def test_a_worker_that_is_started_again_after_the_scheduler_does_not_train_finished_epochs(tmp_path: Path) -> None:
    """Each epoch has its own ledger, and only the living know which of them have ended."""

    def kill_both(job: Job, out: Path) -> None:
        until(lambda: any("begin 2" in file.read_text() for file in out.iterdir()), "the third epoch", 60.0)
        os.kill(job.pid("scheduler", 0), signal.SIGKILL)
        until(lambda: bool(job.events("scheduler_restarted")), "a new scheduler", 60.0)
        os.kill(job.pid("worker", 1), signal.SIGKILL)

    plan = {"store": "dist_async", "num_samples": 60, "batch_size": 2, "epochs": 4, "passes": True}
    plan["compute_s"] = dict.fromkeys("012", 0.2)
    outcome = run_job(tmp_path, plan, restarts=2, disturb=kill_both)
    check(outcome, 60, 4)
    assert len([name for name in outcome.steps if name.startswith("1.")]) == 2


def test_a_worker_that_leaves_an_epoch_does_not_end_it_for_those_that_have_not_begun_it(tmp_path: Path) -> None:
    """Worker 1 is in the second epoch, and the others are still between the first two."""

    def end_worker(job: Job, out: Path) -> None:
        def has_begun() -> bool:
            return any("begin 1" in file.read_text() for file in out.glob("1.*"))

        until(has_begun, "the second epoch of worker 1", 60.0)
        os.kill(job.pid("worker", 1), signal.SIGTERM)

    plan = {"store": "dist_async", "num_samples": 60, "batch_size": 2, "epochs": 2, "passes": True}
    plan |= {"compute_s": {"1": 0.3}, "between_s": {"0": 6.0, "2": 6.0}}
    outcome = run_job(tmp_path, plan, disturb=end_worker)
    check(outcome, 60, 2)
    assert not outcome.in_doubt


def test_a_data_loader_with_processes_and_a_killed_worker(tmp_path: Path) -> None:
    plan = {"store": "dist_async", "num_samples": 90, "batch_size": 3, "epochs": 2, "loader": True}
    outcome = run_job(tmp_path, plan | {"kill": {"rank": 1, "step": 3, "where": "before"}})
    check(outcome, 90, 2)
    assert outcome.partial == 0
