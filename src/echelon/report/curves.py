"""Draws `curves.png`: accuracy over time, working and waiting time per worker, and staleness of the steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from echelon.report.state import sum_histograms

_BLUE, _GREY, _ORANGE = "#2f6db3", "#c9ced6", "#d9822b"


def draw_curves(summary: dict[str, Any], path: Path) -> None:
    """Draw the summary of a run."""
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    accuracy, workers, staleness = figure.subplots(1, 3)
    _accuracy(accuracy, summary)
    _workers(workers, summary)
    _staleness(staleness, summary)
    final = "" if summary["accuracy"] is None else f", accuracy {summary['accuracy']:.4f}"
    figure.suptitle(f"{summary['store']}: {summary['samples_per_s']:.0f} samples/s{final}", fontsize=11)
    figure.savefig(path, dpi=130)


def _accuracy(axes: Axes, summary: dict[str, Any]) -> None:
    points = summary["validations"]
    axes.plot([p["seconds"] for p in points], [p["accuracy"] for p in points], color=_BLUE, marker="o", markersize=3)
    axes.set(xlabel="seconds", ylabel="validation accuracy", title="accuracy over time", ylim=(0, 1.02))
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)


def _workers(axes: Axes, summary: dict[str, Any]) -> None:
    """Draw the working and waiting time of each worker as bars."""
    ranks = [worker["rank"] for worker in summary["workers"]]
    waits = [worker["wait_s"] for worker in summary["workers"]]
    works = [max(0.0, worker["seconds"] - worker["wait_s"]) for worker in summary["workers"]]
    axes.barh(ranks, works, color=_BLUE, label="working")
    axes.barh(ranks, waits, left=works, color=_ORANGE, label="waiting")
    for worker in summary["workers"]:
        label = f"{worker['clock']} steps"
        axes.text(0.02 * summary["seconds"], worker["rank"], label, va="center", color="white", fontsize=8)
    axes.set(xlabel="seconds", ylabel="worker", title="time of each worker", yticks=ranks)
    axes.invert_yaxis()
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, frameon=False)


def _staleness(axes: Axes, summary: dict[str, Any]) -> None:
    total = sum_histograms(worker["staleness"] for worker in summary["workers"])
    axes.bar(list(total), list(total.values()), color=_GREY, edgecolor=_BLUE)
    axes.set(xlabel="updates missed between read and push", ylabel="steps", title="staleness")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
