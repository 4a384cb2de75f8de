"""Pages of runs whose events a test writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from echelon.dash.app import make_app
from echelon.observe.events import FILE_NAME
from echelon.report.follow import RunFollower

BEGAN = 1000.0
Event = dict[str, Any]


def event(kind: str, after_s: float = 0.0, who: str = "worker 0", **fields: Any) -> Event:
    return {"at": BEGAN + after_s, "who": who, "event": kind, **fields}


def begin(rank: int) -> Event:
    return event("begin", who=f"worker {rank}", rank=rank, batches_per_epoch=10, num_epochs=4, first_step=0)


def progress(rank: int, after_s: float, clock: int, kind: str = "progress", **fields: Any) -> Event:
    usual = {"store": 0, "samples": 8 * clock, "wait_s": 0.5, "staleness": {"0": clock}, "rounds_ahead": {}}
    return event(kind, after_s, f"worker {rank}", rank=rank, clock=clock, **usual | fields)


def write(folder: Path, *events: Event) -> None:
    with (folder / FILE_NAME).open("a") as file:
        file.writelines(json.dumps(one) + "\n" for one in events)


@contextmanager
def page_of(
    folder: Path, *, after_s: float = 0.0, token: str | None = None, base_url: str = "http://127.0.0.1:8077"
) -> Iterator[TestClient]:
    """Serve the page of a folder, some time after the beginning of the run; all events so far are read."""
    follower = RunFollower(folder)
    follower.read_all()
    app = make_app(follower, token=token, port=8077, clock=lambda: BEGAN + after_s)
    yield TestClient(app, base_url=base_url)
