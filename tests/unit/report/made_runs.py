"""Runs whose events are made by hand, for tests of what is read from them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Event = dict[str, Any]

START = 1_700_000_000.0
SETTINGS = {"network": "digits-cnn", "data": "digits", "kv_store": "dist_ssync", "staleness": 3, "lr": 0.05}
JOB = {
    "num_workers": 2,
    "num_servers": 1,
    "command": "echelon train -n 2",
    "commit": "0123456789abcdef0123-dirty",
    "version": "0.1.0",
    "machine": {"cpu": "a CPU", "cores": 2, "memory_gib": 8.0, "kernel": "Linux", "python": "3.11", "torch": "2.6"},
}


def event(kind: str, seconds: float, who: str = "worker 0", /, **fields: Any) -> Event:
    return {"at": START + seconds, "who": who, "event": kind, **fields}


def begin(rank: int, seconds: float = 0.0) -> Event:
    return event("begin", seconds, rank=rank, batches_per_epoch=10, num_epochs=4, first_step=0)


def report(rank: int, seconds: float, clock: int, kind: str = "progress", /, **changed: Any) -> Event:
    """Return the report of a worker that makes a step of 32 samples per `seconds / clock`, and waits for half of it."""
    step = seconds / max(1, clock)
    phases = {"compute_s": seconds * 0.4, "push_s": seconds * 0.05, "wait_s": seconds * 0.5, "pull_s": seconds * 0.05}
    steps = [[START + seconds, step * 0.4, step * 0.05, step * 0.5, step * 0.05]]
    usual = {"store": 0, "clock": clock, "samples": 32 * clock, "staleness": {"0": 1, "2": clock}}
    usual |= {"rounds_ahead": {"0": 1, "3": clock}, "steps": steps, "other_s": 0.0}
    usual |= {"bytes": {"pushed": 1000 * clock, "pulled": 1000 * clock, "sent": 2100 * clock, "received": 10}}
    return event(kind, seconds, f"worker {rank}", rank=rank) | phases | usual | changed


def training(rank: int, seconds: float, epoch: float, loss: float | None = 0.5) -> Event:
    return event("training", seconds, rank=rank, epoch=epoch, samples=32, accuracy=0.8, loss=loss)


def validation(seconds: float, epoch: float, accuracy: float | None = 0.9, loss: float | None = 0.4) -> Event:
    return event("validation", seconds, epoch=epoch, seconds=seconds, accuracy=accuracy, loss=loss, metrics={})


def whole_run(num_workers: int = 2, num_reports: int = 40) -> list[Event]:
    """Return a run of 20 s in which every worker makes 40 steps, with its job, store, settings and curves."""
    events = [event("job", -1.0, "launcher 0", rank=0, **JOB), event("settings", -0.5, **SETTINGS)]
    events.append(event("store", -0.2, store=0, name="dist_ssync", scheme="SSP", groups=None, staleness=3, bytes=4000))
    events += [begin(rank) for rank in range(num_workers)]
    for index in range(1, num_reports + 1):
        seconds = 20.0 * index / num_reports
        kind = "done" if index == num_reports else "progress"
        for rank in range(num_workers):
            events.append(training(rank, seconds, seconds / 5, loss=2.0 / index))
            events.append(report(rank, seconds, max(1, round(40 * index / num_reports)), kind, seconds=seconds))
        if index % (max(4, num_reports) // 4) == 0:
            events.append(validation(seconds, seconds / 5, accuracy=0.5 + 0.02 * seconds))
    return [*events, event("final", 20.1, epoch=4, accuracy=0.95, loss=0.2)]


def write_run(folder: Path, events: Iterable[Event], summary: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in events))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder
