"""The figures of a run by epoch, from its events."""

from __future__ import annotations

from typing import Any

from echelon.report.state.epochs import EpochRow, epoch_rows
from echelon.report.state.run import Event, RunState


def epoch(rank: int, number: int, accuracy: float | None, seconds: float = 2.0, samples: int = 100) -> Event:
    fields: dict[str, Any] = {"rank": rank, "epoch": number, "samples": samples, "seconds": seconds}
    return {"event": "epoch", "at": 1.0, "who": f"worker {rank}", **fields, "metrics": {"accuracy": accuracy}}


def validation(number: float, accuracy: float) -> Event:
    fields = {"epoch": number, "accuracy": accuracy, "loss": 0.5, "seconds": 1.0, "metrics": {}}
    return {"event": "validation", "at": 1.0, "who": "worker 0", **fields}


def rows(*events: Event) -> list[EpochRow]:
    state = RunState()
    state.take(events)
    return epoch_rows(state)


def test_figures_are_means_over_the_workers_and_speeds_are_sums() -> None:
    assert rows(epoch(0, 1, 0.5), epoch(1, 1, 0.7, seconds=4.0), validation(1.0, 0.8)) == [
        EpochRow(1, 0.6, 0.8, 3.0, 75.0)
    ]


def test_an_epoch_has_the_figures_that_were_measured() -> None:
    """Validations in the middle of an epoch are not of a whole epoch; nan is null in the event."""
    assert rows(epoch(0, 1, None), validation(1.5, 0.7), validation(2.0, 0.8)) == [
        EpochRow(1, None, None, 2.0, 50.0),
        EpochRow(2, None, 0.8, None, None),
    ]


def test_a_worker_that_repeats_an_epoch_after_a_restart_counts_once() -> None:
    assert rows(epoch(0, 1, 0.5), epoch(0, 1, 0.6)) == [EpochRow(1, 0.6, None, 2.0, 50.0)]
