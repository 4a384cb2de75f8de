"""What the harness reads from the events of a run."""

from __future__ import annotations

from typing import Any

from echelon.bench.dlbs.run_events import RunEvents


def done(rank: int, clock: int, kind: str = "done", **fields: Any) -> dict[str, Any]:
    phases = {"compute_s": 1.0 + rank, "push_s": 0.1, "wait_s": 0.2, "pull_s": 0.3}
    return {"event": kind, "rank": rank, "clock": clock, **phases, **fields}


def test_the_slowest_worker_says_how_far_the_run_is() -> None:
    events = RunEvents()
    assert events.batches == 0
    events.take([done(0, 7, "progress"), {"event": "view", "rank": None}, done(1, 3, "progress")])
    assert events.batches == 3
    events.take([done(1, 9)])
    assert events.batches == 7


def test_the_last_reports_give_phases_bytes_and_staleness() -> None:
    events = RunEvents()
    assert events.records() == {}
    events.take([done(1, 2, staleness={"0": 1, "2": 1}, bytes={"pushed": 10})])
    events.take([done(0, 1, "progress"), done(0, 2, staleness={"0": 2}, bytes={"pushed": 5, "sent": 1})])
    assert events.records() == {
        "results.worker_compute_s": [1.0, 2.0],
        "results.worker_push_s": [0.1, 0.1],
        "results.worker_wait_s": [0.2, 0.2],
        "results.worker_pull_s": [0.3, 0.3],
        "results.bytes": {"pushed": 15, "sent": 1},
        "results.staleness": {"0": 3, "2": 1},
    }
