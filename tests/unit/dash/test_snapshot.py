"""What the live page says about workers, servers and schemes, from the events of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dash_pages import BEGAN, Event, begin, event, progress

from echelon.dash.snapshot import Snapshot, snapshot
from echelon.report.follow import RunFiles
from echelon.report.state.run import RunState

JOB = event("job", num_workers=3, num_servers=1, command="echelon launch -n 3 -s 1 python train.py")
PHASES: dict[str, Any] = {"compute_s": 2.0, "push_s": 0.5, "wait_s": 1.0, "pull_s": 0.5, "other_s": 0.0}


def store(name: str = "dist_sync", scheme: str = "BSP", **fields: Any) -> Event:
    return event("store", store=0, name=name, scheme=scheme, **{"groups": None, "staleness": None} | fields)


def server(after_s: float, own_s: dict[str, float], decision: str = "", rank: int = 0, **fields: Any) -> Event:
    workers = {worker: {"clock": 9, "own_s": seconds, "late_s": 0.01} for worker, seconds in own_s.items()}
    counts = {"pushes": 40, "updates": 20, "held": 1, "sent": 5, "received": 6, "memory_bytes": 7, "cpu_s": 1.0}
    return event(
        "server", after_s, f"server {rank}", rank=rank, store=0, workers=workers, decision=decision, **counts | fields
    )


def taken(*events: Event, after_s: float = 2.0, **files: Any) -> Snapshot:
    state = RunState()
    state.take(events)
    found: dict[str, Any] = {"last_event": max(one["at"] for one in events), **files}
    return snapshot(state, RunFiles(Path("runs/name"), **found), BEGAN + after_s)


def trained(*ranks: int) -> list[Event]:
    return [one for rank in ranks for one in (begin(rank), progress(rank, 1.0, 2), progress(rank, 2.0, 20, **PHASES))]


def test_workers_that_have_not_begun_are_starting() -> None:
    shown = taken(JOB, event("loading", rank=1), begin(0))
    assert [(worker.rank, worker.state, worker.tone) for worker in shown.workers] == [
        (0, "first step", "busy"),
        (1, "loading data", "busy"),
        (2, "starting", "busy"),
    ]


def test_the_slow_worker_is_named_by_arrivals_although_all_have_the_same_rate() -> None:
    shown = taken(JOB, store(), *trained(0, 1, 2), server(2.0, {"0": 0.02, "1": 0.02, "2": 0.06}))
    assert len({worker.samples_per_s for worker in shown.workers}) == 1
    assert [one.rank for one in shown.slow] == [2]
    assert [worker.slowness for worker in shown.workers] == [None, None, pytest.approx(3.0)]
    assert [worker.own_s for worker in shown.workers] == [0.02, 0.02, 0.06]


def test_the_newest_decision_of_each_store_is_shown() -> None:
    shown = taken(JOB, store(), *trained(0), server(1.0, {}, "old", rank=0), server(2.0, {}, "newer", rank=1))
    (one,) = shown.stores
    assert (one.name, one.scheme, one.decision) == ("dist_sync", "BSP", "server 1: newer")


def test_groups_are_those_of_the_store() -> None:
    shown = taken(JOB, store("dist_gsync", "GSP", groups=[[0, 2], [1]]), *trained(0, 1, 2))
    assert [worker.group for worker in shown.workers] == [0, 1, 0]


def test_phases_of_a_worker() -> None:
    steps = [[BEGAN + 1.9, 0.06, 0.01, 0.02, 0.01]] * 2
    (worker, *_) = taken(*trained(0), progress(0, 2.0, 22, **PHASES, steps=steps)).workers
    assert worker.seconds == {"compute": 2.0, "push": 0.5, "wait": 1.0, "pull": 0.5, "other": 0.0}
    assert worker.part("wait") == pytest.approx(0.2), "of the last steps"
    (worker, *_) = taken(*trained(0), progress(0, 2.0, 40, "done", seconds=2.0, **PHASES, steps=steps)).workers
    assert worker.part("wait") == pytest.approx(0.25), "of all steps, after the end"
    (worker, *_) = taken(begin(0)).workers
    assert worker.part("wait") is None


def test_a_worker_that_died_and_came_back() -> None:
    died = event("view", 2.0, number=2, workers=[0], departure="died", reason="worker 1 (pid 7 on h) died: closed")
    shown = taken(*trained(0, 1), died)
    assert (shown.workers[1].state, shown.workers[1].tone) == ("died", "bad")
    assert [(one.kind, one.tone, one.text) for one in shown.faults] == [
        ("died", "bad", "worker 1 (pid 7 on h) died: closed")
    ]
    again = taken(*trained(0, 1), died, begin(1) | {"at": BEGAN + 3.0}, after_s=3.0)
    assert (again.workers[1].state, again.workers[1].tone) == ("first step", "busy")
    assert [one.text for one in again.faults] == ["worker 1", "worker 1 (pid 7 on h) died: closed"], "the latest first"
    assert again.fault_counts == {"died": 1, "joined again": 1}


def test_processes_without_reports_are_marked() -> None:
    events = [JOB, store(), *trained(0, 1), server(2.0, {})]
    shown = taken(*events, progress(0, 30.0, 99, **PHASES), after_s=30.0)
    assert [(worker.tone, worker.note) for worker in shown.workers[:2]] == [
        ("good", ""),
        ("warn", "no report for 0:28"),
    ]
    assert (shown.servers[0].state, shown.servers[0].tone) == ("silent", "warn")
    assert shown.run.status == "training"


def test_after_the_end_nobody_is_slow_or_silent() -> None:
    events = [JOB, store(), *trained(0, 1, 2), server(2.0, {"0": 0.02, "1": 0.02, "2": 0.06})]
    shown = taken(*events, after_s=1000.0, exit_status=137)
    assert shown.run.status == "failed"
    assert shown.slow == []
    assert shown.run.training == 0
    assert {(worker.state, worker.tone, worker.note) for worker in shown.workers} == {("stopped", "warn", "")}
    assert shown.servers[0].state == ""
    assert shown.run.seconds_left is None


def test_a_run_of_an_older_version_has_no_phases_and_no_servers() -> None:
    shown = taken(begin(0), progress(0, 1.0, 2), progress(0, 2.0, 20))
    assert shown.workers[0].bytes == {}
    assert [len(shown.servers), len(shown.stores), len(shown.slow)] == [0, 0, 0]
    assert shown.run.title == ""


def test_events_without_their_usual_fields_do_not_stop_the_page() -> None:
    shown = taken(*trained(0), event("store", store=0), event("view", 2.0, workers=[], departure=None, reason="gone"))
    assert (shown.stores[0].name, shown.stores[0].staleness) == ("", None)
    assert list(shown.fault_counts) == ["None"]
