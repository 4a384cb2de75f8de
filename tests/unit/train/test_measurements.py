"""The training metrics in the event log: what a process writes, and when."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from echelon.observe.events import EventLog, EventReader
from echelon.train.loop.reports.measurements import EVERY_S, Measurements
from echelon.train.step.metrics import Metrics


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def sums(right: float, loss: float, samples: int) -> torch.Tensor:
    return torch.tensor([right, loss, samples], dtype=torch.float64)


def test_an_event_holds_the_means_since_the_last_one(tmp_path: Path) -> None:
    clock = Clock()
    with EventLog(tmp_path, "worker", 3) as log:
        measurements = Measurements(log, 3, Metrics(losses="ce"), clock)
        total = sums(2, 8.0, 4)
        measurements.step(0.25, total)
        total += sums(4, 2.0, 4)  # in place, as in a step
        measurements.step(0.5, total)  # too soon
        clock.now += EVERY_S
        measurements.step(0.75, total)
        total += sums(1, 1.0, 2)
        measurements.end_epoch(1.0, total)
        clock.now += EVERY_S
        measurements.step(1.25, sums(1, 3.0, 2))  # of the next epoch
    events = EventReader(tmp_path).poll()
    assert {event["event"] for event in events} == {"training"}
    assert {event["rank"] for event in events} == {3}
    assert [(e["epoch"], e["samples"], e["accuracy"], e["loss"]) for e in events] == [
        (0.25, 4, 0.5, 2.0),
        (0.75, 4, 1.0, 0.5),
        (1.0, 2, 0.5, 0.5),
        (1.25, 2, 0.5, 1.5),
    ]


def test_an_epoch_whose_samples_are_all_written_adds_no_event(tmp_path: Path) -> None:
    with EventLog(tmp_path, "worker", 0) as log:
        measurements = Measurements(log, 0, Metrics(losses="ce"))
        measurements.step(1.0, sums(1, 1.0, 2))
        measurements.end_epoch(1.0, sums(1, 1.0, 2))
    assert len(EventReader(tmp_path).poll()) == 1


def test_without_a_log_nothing_is_read_from_the_device() -> None:
    measurements = Measurements(EventLog(None, "worker", 0), 0, Metrics())
    on_no_device = torch.empty(2, device="meta")  # reading it raises
    with pytest.raises(NotImplementedError):
        on_no_device.to("cpu", copy=True)
    measurements.step(0.5, on_no_device)
    measurements.end_epoch(1.0, on_no_device)
