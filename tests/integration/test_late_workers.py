"""Workers that join a running job: one that was killed and is started again, a new one, and one that was stopped."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from late_workers import Result, Training

STORES = ["dist_sync", "dist_async", *(pytest.param(s, marks=pytest.mark.long) for s in ("dist_ssync", "dist_gsync"))]
PAUSE_S = 2.0  # a quarter of a second is enough for a death on an idle machine


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def results_of(found: dict[str, Any]) -> dict[str, Result]:
    """Return the results of the workers, after a check that everything ended as it should and all have the same."""
    workers = {name: result for name, result in found.items() if name.startswith("worker")}
    for name, result in workers.items():
        assert isinstance(result, Result), f"{name}: {result!r}"
    first = next(iter(workers.values()))
    for result in workers.values():
        assert result[1:] == first[1:]
    assert [found[f"server {rank}"] for rank in range(2)] == [0, 0]
    return workers


@pytest.mark.parametrize("store", STORES)
def test_a_worker_that_was_killed_and_started_again_trains_with_the_others(store: str, tmp_path: Path) -> None:
    with Training(tmp_path, store, 3) as training:
        killed = training.kill("worker 1")
        training.until_steps("worker 0", 10)
        assert training.longest_pause("worker 0", killed) < PAUSE_S
        started = time.time()
        again = training.start(1, " again")
        training.until_steps(again, 10)
        assert training.longest_pause("worker 0", started) < PAUSE_S
        results = results_of(training.finish())
        assert results.keys() == {"worker 0", "worker 2", again}


@pytest.mark.parametrize("store", STORES)
def test_a_worker_that_was_stopped_joins_again(store: str, tmp_path: Path) -> None:
    with Training(tmp_path, store, 3) as training:
        training.stop("worker 1")
        steps = len(training.steps("worker 1"))
        training.until_workers("worker 0", 0, 2)
        training.until_steps("worker 0", 10)
        training.go_on("worker 1")
        training.until_workers("worker 0", 0, 1, 2)
        training.until_steps("worker 1", 10)
        results = results_of(training.finish())
        assert results["worker 1"].steps > steps


@pytest.mark.parametrize(
    ("sparse", "settings"), [(False, {"lazy_pull": True}), (False, {"max_grad_norm": 0.01}), (True, {})]
)
def test_late_workers_pull_lazily_clip_and_have_sparse_tables(
    sparse: bool, settings: dict[str, Any], tmp_path: Path
) -> None:
    with Training(tmp_path, "dist_sync", 2, sparse=sparse, settings=settings) as training:
        training.kill("worker 0")  # the first rank
        again = training.start(0, " again")
        training.until_steps(again, 10)
        training.stop("worker 1")
        training.until_workers(again, 0)
        training.until_steps(again, 10)
        training.go_on("worker 1")
        training.until_workers(again, 0, 1)
        training.until_steps(again, 10)
        results_of(training.finish())


@pytest.mark.parametrize("store", ["dist_sync", "dist_gsync"])
def test_a_new_rank_joins(store: str, tmp_path: Path) -> None:
    """Under dist_gsync no group lists it, so it is a group by itself."""
    with Training(tmp_path, store, 3) as training:
        new = training.start(3)
        training.until_steps(new, 10)
        training.until_workers("worker 0", 0, 1, 2, 3)
        assert results_of(training.finish()).keys() == {"worker 0", "worker 1", "worker 2", new}


@pytest.mark.parametrize("store", ["dist_ssync", "dist_gsync"])
def test_a_worker_that_joins_takes_the_settings_of_the_scheme_from_the_job(store: str, tmp_path: Path) -> None:
    with Training(tmp_path, store, 3) as training:
        new = training.join(3)
        training.until_steps(new, 10)
        training.until_workers("worker 0", 0, 1, 2, 3)
        assert new in results_of(training.finish())


def test_a_worker_that_joins_with_another_bound_is_refused_with_both(tmp_path: Path) -> None:
    with Training(tmp_path, "dist_ssync", 2) as training:
        refused = str(training.result(training.join(2, {"staleness": 5})))
        assert "created dist_ssync(staleness=2), but worker 2 created dist_ssync(staleness=5)" in refused
        training.finish()


def test_a_late_worker_whose_optimizer_would_run_in_the_worker_is_refused(tmp_path: Path) -> None:
    with Training(tmp_path, "dist_sync", 2, settings={"update_on_kvstore": False}) as training:
        training.kill("worker 1")
        refused = training.result(training.start(1, " again", waits=False))
        assert "with update_on_kvstore=False a worker cannot join a job that is running" in str(refused)
        training.finish()
