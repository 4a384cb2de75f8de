"""The epochs of a log as text. Markdown and `none` are what MXNet 1.9's parse_log prints, byte for byte.

A figure that an epoch lacks is an empty cell, where MXNet's script ends with an error. Epochs count from 1.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from echelon.report.logs.epochs import Epoch, Training, Worker

SPEEDS = ("none", "total", "workers")  # which speeds are added


@dataclass(frozen=True, slots=True)
class Column:
    """A column after that of the epoch: its title, its value of an epoch, and how it is written for a reader."""

    title: str
    value: Callable[[Epoch], float | None]
    written: str


def columns(training: Training, metric_names: Sequence[str], speeds: str) -> list[Column]:
    """Return the columns: training metrics, validation metrics, time, and the speeds that are asked for."""
    chosen = training.choose(metric_names)
    found = [Column(f"train-{name}", _mean("train", metric), "%f") for name, metric in chosen.items()]
    found += [Column(f"val-{name}", _mean("validation", metric), "%f") for name, metric in chosen.items()]
    found.append(Column("time", _mean("time", ""), "%.1f"))
    if speeds == "workers":
        found += [Column(_speed_title(worker), _worker_speed(worker), "%.2f") for worker in training.workers]
    if speeds != "none":
        found.append(Column("speed", Epoch.speed, "%.2f"))
    return found


def _speed_title(worker: Worker) -> str:
    return f"speed-{worker.replace(' ', '-') or 'per-worker'}"


def _mean(kind: Any, metric: str) -> Callable[[Epoch], float | None]:
    return lambda epoch: epoch.mean(kind, metric)


def _worker_speed(worker: Worker) -> Callable[[Epoch], float | None]:
    return lambda epoch: epoch.worker_speed(worker)


def rows_of(training: Training, shown: Sequence[Column]) -> list[Epoch]:
    """Return the epochs that have one of these figures at least. The last epoch of a stopped run may have none."""
    return [epoch for epoch in training.epochs.values() if any(one.value(epoch) is not None for one in shown)]


def as_markdown(epochs: Sequence[Epoch], shown: Sequence[Column]) -> str:
    """Return a Markdown table."""
    rows = [f"| {' | '.join(cells)} |" for cells in _cells(epochs, shown)]
    return "\n".join([rows[0], f"{'| --- ' * (len(shown) + 1)}|", *rows[1:]])


def as_tabs(epochs: Sequence[Epoch], shown: Sequence[Column]) -> str:
    """Return columns separated by tabs."""
    return "\n".join("\t".join(cells) for cells in _cells(epochs, shown))


def _cells(epochs: Sequence[Epoch], shown: Sequence[Column]) -> list[list[str]]:
    rows = [["epoch", *(column.title for column in shown)]]
    for epoch in epochs:
        values = [(column, column.value(epoch)) for column in shown]
        rows.append(
            [f"{epoch.number + 1:2d}", *("" if value is None else column.written % value for column, value in values)]
        )
    return rows


def as_csv(epochs: Sequence[Epoch], shown: Sequence[Column]) -> str:
    """Return comma-separated values with all digits."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["epoch", *(column.title for column in shown)])
    writer.writerows([epoch.number + 1, *(column.value(epoch) for column in shown)] for epoch in epochs)
    return text.getvalue().rstrip("\n")


def as_json(epochs: Sequence[Epoch], shown: Sequence[Column]) -> str:
    """Return a list with one object per epoch. JSON has null for a figure that is missing or not finite."""
    body = [{"epoch": epoch.number + 1} | {one.title: _finite(one.value(epoch)) for one in shown} for epoch in epochs]
    return json.dumps(body, indent=2)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


FORMATS: dict[str, Callable[[Sequence[Epoch], Sequence[Column]], str]] = {
    "markdown": as_markdown,
    "csv": as_csv,
    "json": as_json,
    "none": as_tabs,
}
