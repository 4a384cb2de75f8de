"""What a run's events say about its progress: phases, the time left, the metrics, and workers that leave."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.report.state.run import Event, RunState
from echelon.report.state.time_curve import MAX_POINTS, TimeCurve


def event(kind: str, at: float = 1000.0, **fields: Any) -> Event:
    return {"event": kind, "at": at, "who": "test", **fields}


def begin(rank: int, *, per_epoch: int = 10, num_epochs: int = 4, first_step: int = 0) -> Event:
    return event("begin", rank=rank, batches_per_epoch=per_epoch, num_epochs=num_epochs, first_step=first_step)


def progress(rank: int, at: float, clock: int, kind: str = "progress", **fields: Any) -> Event:
    usual = {"samples": 8 * clock, "wait_s": 0.0, "staleness": {}, "rounds_ahead": {}}
    return event(kind, at, rank=rank, clock=clock, **usual, **fields)


def taken(*events: Event) -> RunState:
    state = RunState()
    state.take(events)
    return state


def view(workers: list[int], departure: str, reason: str = "") -> Event:
    return event("view", number=2, workers=workers, departure=departure, reason=reason)


def test_processes_have_phases_before_the_first_step() -> None:
    state = taken(
        event("registered") | {"who": "server 1 (pid 7 on host)"},
        event("registered") | {"who": "Register(role='dancer')"},  # refused
        event("loading", rank=0),
        event("loading", rank=1),
        event("registered") | {"who": "worker 1 (pid 8 on host)"},
    )
    assert state.processes == {"server 1": "registered", "worker 0": "loading data", "worker 1": "registered"}
    state.take([begin(1)])
    assert state.processes["worker 1"] == state.workers[1].phase == "first step"
    state.take([progress(1, 1001.0, 1)])
    assert state.workers[1].phase == "training"


def test_the_time_left_is_that_of_the_slowest_worker() -> None:
    state = taken(begin(0), begin(1), progress(0, 1005.0, 1), progress(1, 1005.0, 1))
    assert state.seconds_left(1005.0) is None, "one report says nothing about the speed after the first step"
    state.take([progress(0, 1015.0, 21), progress(1, 1015.0, 11)])
    # Worker 0 makes 2 steps per second and has 19 of 40 left, worker 1 makes 1 per second and has 29 left.
    assert state.seconds_left(1015.0) == pytest.approx(29.0)
    assert state.seconds_left(1015.5) == pytest.approx(28.5)
    assert state.seconds_left(1099.0) == pytest.approx(28.0), "a worker that waits does not come nearer to its end"
    assert state.fraction_done == pytest.approx(11 / 40)
    state.take([view([0], "died")])
    assert state.seconds_left(1015.0) == pytest.approx(9.5)
    assert state.fraction_done == pytest.approx(21 / 40)
    state.take([progress(0, 1025.0, 40, "done", seconds=25.0)])
    assert (state.seconds_left(1025.0), state.fraction_done, state.active) == (0.0, 1.0, [])


def test_a_resumed_run_counts_only_the_steps_that_it_makes() -> None:
    state = taken(begin(0, first_step=25), progress(0, 1001.0, 1), progress(0, 1006.0, 6))
    worker = state.workers[0]
    assert (worker.epochs_done, worker.num_steps) == (3.1, 15)
    assert state.fraction_done == pytest.approx(6 / 15)
    assert state.seconds_left(1006.0) == pytest.approx(9.0)


def test_without_the_plan_of_the_run_nothing_is_guessed() -> None:
    state = taken(event("begin", rank=0), progress(0, 1001.0, 1), progress(0, 1002.0, 2))
    assert (state.fraction_done, state.seconds_left(1002.0), state.workers[0].epochs_done) == (None, None, 0.0)


def stores(kind: str, store: int, open_stores: int) -> Event:
    return event(kind, worker=0, store=store, open=open_stores)


def test_a_worker_that_has_closed_its_stores_has_left_until_it_opens_another() -> None:
    state = taken(stores("store_opened", 0, 1), progress(0, 1001.0, 1), stores("store_closed", 0, 0))
    assert state.workers[0].phase == "left"
    state.take([progress(0, 1001.1, 1)])  # written before it left
    assert state.workers[0].phase == "left"
    state.take([stores("store_opened", 1, 1), progress(0, 1002.0, 5, store=1)])
    assert (state.workers[0].phase, state.workers[0].clock) == ("training", 5)


def test_a_worker_with_two_stores_shows_the_steps_of_one() -> None:
    state = taken(progress(0, 1001.0, 1, store=0), progress(0, 1001.1, 7, store=1), progress(0, 1002.0, 2, store=0))
    assert state.workers[0].clock == 2
    state.take([stores("store_closed", 0, 1), progress(0, 1003.0, 8, store=1)])
    assert (state.workers[0].phase, state.workers[0].clock) == ("training", 8)


def test_a_worker_that_finished_before_it_closed_its_store_stays_finished() -> None:
    state = taken(begin(0), progress(0, 1001.0, 40, "done", seconds=1.0), stores("store_closed", 0, 0))
    assert state.workers[0].phase == "finished"


def test_a_worker_that_leaves_has_its_departure_as_phase() -> None:
    state = taken(begin(0), begin(1), begin(2), progress(2, 1001.0, 40, "done", seconds=1.0))
    state.take([view([0, 1], "left"), view([0], "died", "worker 1 (pid 3 on host) died: its connection closed")])
    assert {rank: worker.phase for rank, worker in state.workers.items()} == {0: "first step", 1: "died", 2: "finished"}
    assert [news.text for news in state.news] == ["worker 1 (pid 3 on host) died: its connection closed"]
    state.take([progress(1, 1002.0, 5)])  # written before it died, read after
    assert state.workers[1].phase == "died"
    state.take([begin(1)])
    assert state.workers[1].phase == "first step"
    assert state.news[-1].text == "worker 1 joined again"


def test_a_worker_that_ends_before_its_last_step_was_stopped() -> None:
    state = taken(begin(0), begin(1), progress(0, 1002.0, 40, "done", seconds=2.0))
    state.take([progress(1, 1002.0, 39, "done", seconds=2.0)])
    assert [worker.phase for worker in state.ranked] == ["finished", "stopped"]
    assert state.active == []


def test_validation_progress_ends_with_its_result() -> None:
    state = taken(event("validation", epoch=1.0, done=500, total=1000))
    assert (state.validating or {})["done"] == 500
    assert state.validations == []
    state.take([event("validation", epoch=1.0, accuracy=0.5, loss=1.0, seconds=3.0)])
    assert state.validating is None
    assert len(state.validations) == 1
    state.take([event("validation", epoch=2.0, done=0, total=1000), event("final", accuracy=0.5, loss=1.0)])
    assert state.validating is None


def test_a_loss_that_is_not_a_number_stays_one() -> None:
    state = taken(begin(0), event("training", 1001.0, rank=0, epoch=0.1, samples=8, loss=None, accuracy=0.1))
    assert math.isnan(state.workers[0].loss or 0.0)
    assert state.workers[0].accuracy == 0.1


def test_the_training_curve_is_the_mean_over_workers() -> None:
    state = taken(
        begin(0),
        begin(1),
        event("training", 1001.00, rank=0, epoch=0.1, samples=30, loss=1.0, accuracy=0.5),
        event("training", 1001.01, rank=1, epoch=0.1, samples=10, loss=3.0, accuracy=0.1),
        event("training", 1002.0, rank=0, epoch=0.2, samples=30, loss=0.5, accuracy=0.6),
    )
    first, second = state.training.points()
    assert first == pytest.approx({"seconds": 1.0025, "loss": 1.5, "accuracy": 0.4}, rel=1e-3)
    assert second == pytest.approx({"seconds": 2.0, "loss": 0.5, "accuracy": 0.6})


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.floats(0, 1e5), st.integers(1, 100), st.floats(0, 10)), min_size=1, max_size=600))
def test_a_curve_has_few_points_and_keeps_the_mean(added: list[tuple[float, int, float]]) -> None:
    curve, total = TimeCurve(), sum(samples for _, samples, _ in added)
    for seconds, samples, loss in added:
        curve.add(seconds, samples, loss, loss / 10)
    points = curve.points()
    assert 1 <= len(points) <= MAX_POINTS
    assert [p["seconds"] for p in points] == sorted(p["seconds"] for p in points)
    mean = sum(samples * loss for _, samples, loss in added) / total
    assert min(p["loss"] for p in points) - 1e-9 <= mean <= max(p["loss"] for p in points) + 1e-9


def died(rank: int, workers: list[int]) -> Event:
    return view(workers, "died", f"worker {rank} (pid 7 on host) died: its connection closed")


def test_the_samples_of_a_job_are_those_of_its_ledger_although_a_worker_died_after_its_last_report() -> None:
    opened = event("ledger_opened", store=0, ledger=0, samples=100, epoch=1, done=20)
    trained = event("epoch_trained", store=0, ledger=0, epochs=3, partial=0)
    state = taken(begin(0), begin(1), opened, progress(0, 1001.0, 10), progress(1, 1001.0, 5), died(1, [0]))
    assert state.samples == 120, "reports, because no epoch is complete"
    state.take([progress(0, 1002.0, 17, "done", seconds=2.0), trained])
    assert state.samples == 180, "two epochs without the samples that were trained before"


@pytest.mark.parametrize("has_begin", [True, False])
def test_a_restarted_worker_has_the_steps_of_its_earlier_process_too(has_begin: bool) -> None:
    joined = view([0, 1], "joined", "worker 1 (pid 8 on host) joined")
    state = taken(begin(0), begin(1), progress(1, 1001.0, 5), died(1, [0]), joined)
    state.take([begin(1)] if has_begin else [])
    state.take([progress(1, 1002.0, 2)])
    worker = state.workers[1]
    assert (worker.all_steps, worker.all_samples, worker.deaths, worker.restarts) == (7, 56, 1, 1)
    assert worker.phase == "training"
    assert [fault.kind for fault in state.faults] == ["died", "joined again"]


def test_a_worker_that_is_killed_after_its_last_step_is_lost() -> None:
    ended = [progress(rank, 1001.0, 5, "done", seconds=1.0) for rank in (0, 1)]
    state = taken(begin(0), begin(1), *ended, view([1], "left", "worker 0 (pid 6 on host) left: it finished"))
    assert state.faults == []
    state.take([died(1, [])])
    assert [(fault.kind, fault.who) for fault in state.faults] == [("died", "worker 1")], "worker 0 has left before"


def test_the_reason_why_a_result_is_not_whole() -> None:
    assert taken(event("not_whole", reason="worker 0: the disk is full")).not_whole == "worker 0: the disk is full"
