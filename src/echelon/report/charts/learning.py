"""Accuracy and loss of training and validation, by epoch and by time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from echelon.report.charts.chart import Line, Lines, axis, axis_of
from echelon.report.charts.recorded import RecordedRun
from echelon.report.charts.scales import thin, unit_of_time
from echelon.report.colours import GREY

MOST_POINTS = 240  # per line
MOST_MARKS = 30


def learning_charts(runs: Sequence[RecordedRun], colours: Sequence[str]) -> list[Lines]:
    """Return accuracy and loss, each by epoch and by time; a chart without a value is left out."""
    charts = [_chart(runs, colours, metric, by) for metric in ("accuracy", "loss") for by in ("epoch", "seconds")]
    return [chart for chart in charts if any(math.isfinite(y) for line in chart.lines for _, y in line.points)]


def _chart(runs: Sequence[RecordedRun], colours: Sequence[str], metric: str, by: str) -> Lines:
    scale, unit = unit_of_time(max(run.seconds for run in runs))
    if by == "epoch":
        scale, x_label, title = 1.0, "epochs", f"{metric.capitalize()} by epoch"
    else:
        x_label, title = f"time ({unit})", f"{metric.capitalize()} by time"
    lines = []
    for run, colour in zip(runs, colours, strict=True):
        name, alone = run.name, len(runs) == 1
        training, validation = ("training", "validation") if alone else (f"{name}, training", name)
        lines += [
            _line(training, _training(run, by), metric, by, scale, GREY if alone else colour, faint=True),
            _line(validation, _validations(run), metric, by, scale, colour),
        ]
    drawn = tuple(line for line in lines if line.points)
    values = [y for line in drawn for _, y in line.points]
    y = axis(metric, 0.0, 1.02) if metric == "accuracy" else axis_of("loss (cross-entropy)", values, may_be_log=True)
    x = axis(x_label, 0.0, max((x for line in drawn for x, _ in line.points), default=1.0))
    note = "Thin lines: training." if len(runs) > 1 and any(line.faint for line in drawn) else ""
    return Lines(f"{metric}-{by}", title, x, y, drawn, note=note)


def _line(
    label: str, rows: Sequence[dict[str, Any]], metric: str, by: str, scale: float, colour: str, *, faint: bool = False
) -> Line:
    points = sorted((row[by] / scale, as_float(row[metric])) for row in rows if row.get(by) is not None)
    return Line(label, tuple(thin(points, MOST_POINTS)), colour, faint, marks=not faint and len(points) <= MOST_MARKS)


def _training(run: RecordedRun, by: str) -> list[dict[str, float]]:
    return run.history.training_by_epoch.points("epoch") if by == "epoch" else run.state.training.points()


def _validations(run: RecordedRun) -> list[dict[str, Any]]:
    """Return the validations, and the final one, which has no time: it follows the last step."""
    rows = [
        {"epoch": event.get("epoch"), "seconds": event.get("seconds", event["at"] - run.start)}
        | {"accuracy": event["accuracy"], "loss": event.get("loss")}
        for event in run.state.validations
    ]
    final = run.state.final
    if final is not None and final.get("accuracy") is not None:
        after = max(run.seconds, rows[-1]["seconds"] if rows else 0.0)
        rows.append({"seconds": after, **{name: final.get(name) for name in ("epoch", "accuracy", "loss")}})
    return rows


def as_float(value: float | None) -> float:
    """Return NaN, a gap in a line, for a value that JSON cannot hold."""
    return math.nan if value is None else float(value)
