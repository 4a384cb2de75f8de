"""Draws `curves.png`: accuracy and loss over time, the time of each worker, and the staleness of the steps.

A run has only the panels for which it has data: without servers there is no staleness, a worker alone does not wait.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from echelon.report.charts.scales import unit_of_time
from echelon.report.state.worker import FINISHED, sum_histograms

Summary = dict[str, Any]
Panel = Callable[[Axes, Summary], None]

_BLUE, _LIGHT, _GREY, _ORANGE = "#2f6db3", "#c9ced6", "#8a94a3", "#d9822b"
_PANEL_INCHES = (4.4, 3.3)
_TITLE_LETTERS_PER_INCH = 12
_MOST_LABELLED_BARS = 12
_MOST_MARKED_POINTS = 40
_LOG_LOSS = 20.0  # a loss above it, far beyond that of guessing, hides the others on a linear axis


def draw_curves(summary: Summary, path: Path) -> None:
    """Draw the summary of a run into a PNG file."""
    figure_of(summary).savefig(path, dpi=130)


def figure_of(summary: Summary) -> Figure:
    """Return the drawing of the summary of a run."""
    rows = panel_rows(summary)
    width, height = _PANEL_INCHES
    size = max(map(len, rows)) * width, len(rows) * height + 0.4
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    for part, row in zip(figure.subfigures(len(rows), 1, squeeze=False)[:, 0], rows, strict=True):
        for axes, panel in zip(part.subplots(1, len(row), squeeze=False)[0], row, strict=True):
            panel(axes, summary)
    figure.suptitle(textwrap.fill(_title(summary), int(size[0] * _TITLE_LETTERS_PER_INCH)), fontsize=11)
    return figure


def panel_rows(summary: Summary) -> list[list[Panel]]:
    """Return the panels for which the run has data, row by row: at most three side by side."""
    workers = summary["workers"]
    metrics: list[Panel] = [_accuracy, _loss] if summary["validations"] or summary["training"] else []
    speed: list[Panel] = []
    if len(workers) > 1 or any(worker["wait_s"] for worker in workers) or not metrics:
        speed.append(_workers if workers else _nothing)
    if any(value != "0" for worker in workers for value in worker["staleness"]):
        speed += [_updates_missed] if summary["staleness_bound"] is None else [_rounds_ahead, _updates_missed]
    return [metrics + speed] if len(metrics + speed) <= 3 else [metrics, speed]


def _title(summary: Summary) -> str:
    settings = summary["settings"]
    data = "synthetic data" if settings.get("benchmark") else settings["data"]
    run = f"{settings['network']} on {data}, "
    title = f"{run}{summary['store']}: {summary['samples_per_s']:.0f} samples/s"
    if summary["accuracy"] is not None:
        title += f", {'final' if summary['accuracy_is_final'] else 'last'} accuracy {summary['accuracy']:.4f}"
    return title if not summary["exit_status"] else f"{title} (exit status {summary['exit_status']})"


def _accuracy(axes: Axes, summary: Summary) -> None:
    _over_time(axes, summary, "accuracy")
    if summary["accuracy_is_final"]:
        scale, _ = unit_of_time(summary["seconds"])
        axes.plot(
            [summary["seconds"] / scale],
            [summary["accuracy"]],
            color=_BLUE,
            marker="o",
            markersize=10,
            fillstyle="none",
            linestyle="none",
            label="validation, final weights",
        )
    axes.set_ylim(0, 1.03)
    axes.legend(fontsize=8, loc="lower right")


def _loss(axes: Axes, summary: Summary) -> None:
    values = [value for value in _over_time(axes, summary, "loss") if value is not None]
    if max(values, default=0.0) > _LOG_LOSS and min(values) > 0:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_ylabel("loss (cross-entropy)")
    axes.legend(fontsize=8)


def _over_time(axes: Axes, summary: Summary, name: str) -> list[float | None]:
    """Draw a metric of training and validation over time; returns its values."""
    scale, unit = unit_of_time(summary["seconds"])
    drawn: list[float | None] = []
    for label, points, colour in (
        ("training", summary["training"], _GREY),
        ("validation", summary["validations"], _BLUE),
    ):
        if points:
            x, y = [point["seconds"] / scale for point in points], [point[name] for point in points]
            size = 4 if len(points) <= _MOST_MARKED_POINTS else 0  # a point alone is visible only by its marker
            axes.plot(x, _as_floats(y), color=colour, marker="o", markersize=size, label=label)
            drawn += y
    axes.set(xlabel=f"time ({unit})", ylabel=name, title=f"{name} over time")
    axes.set_xlim(0, max(1e-9, summary["seconds"] / scale * 1.03))
    axes.grid(alpha=0.3)
    return drawn


def _as_floats(values: Sequence[float | None]) -> list[float]:
    """Return NaN, which leaves a gap in a line, for values that JSON cannot hold."""
    return [float("nan") if value is None else value for value in values]


def _workers(axes: Axes, summary: Summary) -> None:
    """Draw the working and waiting time of each worker as bars."""
    workers = summary["workers"]
    scale, unit = unit_of_time(summary["seconds"])
    ranks = [worker["rank"] for worker in workers]
    waits = [worker["wait_s"] / scale for worker in workers]
    works = [max(0.0, worker["seconds"] / scale - wait) for worker, wait in zip(workers, waits, strict=True)]
    axes.barh(ranks, works, color=_BLUE, label="working")
    axes.barh(ranks, waits, left=works, color=_ORANGE, label="waiting")
    room = 1.05  # at the right, for the labels
    if len(workers) <= _MOST_LABELLED_BARS:
        room = 1.3 if all(worker["phase"] == FINISHED for worker in workers) else 1.6
        for worker, work, wait in zip(workers, works, waits, strict=True):
            label = f" {worker['clock']} steps" + ("" if worker["phase"] == FINISHED else f", {worker['phase']}")
            axes.text(work + wait, worker["rank"], label, va="center", fontsize=8)
        axes.set_yticks(ranks)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel=f"time ({unit})", ylabel="worker", title="time of each worker")
    axes.set_xlim(0, room * max(1e-9, *(work + wait for work, wait in zip(works, waits, strict=True))))
    axes.set_ylim(max(ranks) + 0.6, min(ranks) - 0.6)  # worker 0 at the top
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.19), ncols=2, frameon=False)


def _nothing(axes: Axes, summary: Summary) -> None:
    """Say that there is nothing to draw."""
    axes.set_axis_off()
    axes.text(0.5, 0.5, "no worker reported anything", ha="center", va="center", transform=axes.transAxes)


def _rounds_ahead(axes: Axes, summary: Summary) -> None:
    _histogram(axes, summary, "rounds_ahead", "staleness in rounds")
    bound = summary["staleness_bound"]
    axes.axvline(bound + 0.5, color=_ORANGE, linestyle="--", label=f"bound {bound}")
    axes.set_xlabel("rounds ahead of the slowest worker")
    axes.legend(fontsize=8)


def _updates_missed(axes: Axes, summary: Summary) -> None:
    _histogram(axes, summary, "staleness", "staleness in updates")
    axes.set_xlabel("updates of others between read and push")


def _histogram(axes: Axes, summary: Summary, name: str, title: str) -> None:
    total = sum_histograms(worker[name] for worker in summary["workers"])
    axes.bar(list(total), list(total.values()), color=_LIGHT, edgecolor=_BLUE)
    axes.set(ylabel="steps of all workers", title=title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
