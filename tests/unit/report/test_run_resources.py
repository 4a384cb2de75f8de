"""How busy the devices of a run are, from the events of its launcher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from echelon.observe.events import EventReader
from echelon.observe.resource_events import EVERY_S, ResourceEvents
from echelon.report.state.run import Event, RunState


def sample(cpu_percent: float, *gpus: float) -> Event:
    found = [{"utilisation_percent": percent, "memory_mib": 0.0, "power_w": None} for percent in gpus]
    return {"event": "resources", "at": 1.0, "who": "launcher 0", "cpu_percent": cpu_percent, "gpus": found}


def report(kind: str, **fields: Any) -> Event:
    common = {"rank": 0, "clock": 1, "samples": 8, "wait_s": 0.0, "staleness": {}}
    return {"event": kind, "at": 1.0, "who": "worker 0", **common, **fields}


def state_of(*events: Event) -> RunState:
    state = RunState()
    state.take([{"event": "job", "at": 0.0, "who": "launcher 0", "machine": {"cores": 4}}, *events])
    return state


def test_the_cores_are_busy_by_the_mean_over_the_samples_while_the_run_trains() -> None:
    state = state_of(
        sample(400.0), report("progress"), sample(100.0), sample(300.0), report("done", seconds=1.0), sample(400.0)
    )
    assert state.utilisation(["cpu"]) == 0.5


def test_the_gpus_of_a_run_are_the_busiest_ones() -> None:
    state = state_of(report("progress"), sample(10.0, 0.0, 80.0, 100.0), sample(10.0, 0.0, 100.0, 100.0))
    assert state.utilisation(["cuda:0", "cuda:1"]) == 0.95
    assert state.utilisation(["cuda:0", "cuda:0"]) == 1.0  # two processes on one GPU


@pytest.mark.parametrize("events", [(), (report("progress"), sample(50.0))])
def test_a_utilisation_that_was_not_measured_is_none(events: tuple[Event, ...]) -> None:
    assert state_of(*events).utilisation(["cuda:0"]) is None


def test_the_launcher_writes_a_sample_every_few_seconds(tmp_path: Path) -> None:
    now = [100.0]
    resources = ResourceEvents(str(tmp_path), clock=lambda: now[0])
    for seconds in (0.0, EVERY_S / 2, EVERY_S / 2, EVERY_S):
        now[0] += seconds
        resources.tick()
    resources.close()
    found = EventReader(tmp_path).poll()
    assert [event["event"] for event in found] == ["resources"] * 3
    assert found[0]["who"] == "launcher 0"
    assert found[0].keys() >= {"cpu_percent", "resident_mib", "sent_mib", "received_mib", "gpus"}


def test_without_a_directory_nothing_is_written() -> None:
    resources = ResourceEvents(None)
    resources.tick()
    resources.close()
