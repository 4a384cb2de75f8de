"""Draws repeated runs: per panel and store the median accuracy over time, and a band from the lowest to the highest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from echelon.report.colours import run_colours

Curve: TypeAlias = Sequence[tuple[float, float]]  # (seconds, accuracy), in the order of time
Panels: TypeAlias = Mapping[str, Mapping[str, Sequence[Curve]]]  # by title, then by store: one curve per seed
Floats: TypeAlias = NDArray[np.float64]

_GRID_POINTS = 400
_PANEL_INCHES = (4.1, 3.5)
_GREY = "#6b7480"


def draw_bands(panels: Panels, target: float, path: Path) -> None:
    """Draw one panel per entry. Runs end when they reach the target; a ring marks the median time of that."""
    figure = bands_figure(panels, target)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def bands_figure(panels: Panels, target: float) -> Figure:
    """Return the drawing. Up to three panels lie side by side, four as two rows of two."""
    columns = len(panels) if len(panels) <= 3 else math.ceil(len(panels) / math.ceil(len(panels) / 3))
    rows = math.ceil(len(panels) / columns)
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(columns * width, rows * height + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for axes, (title, curves_of) in zip(grid.flat, panels.items(), strict=False):
        _panel(axes, title, curves_of, target)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_axis_off()
    for row in grid:
        row[0].set_ylabel("validation accuracy")
    handles, labels = grid[0][0].get_legend_handles_labels()
    seeds = max((len(curves) for curves_of in panels.values() for curves in curves_of.values()), default=0)
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    figure.suptitle(
        f"line: median of {seeds} seeds; band: lowest to highest; ring: median time to {target:g}",
        fontsize=9.5,
        color=_GREY,
    )
    return figure


def _panel(axes: Axes, title: str, curves_of: Mapping[str, Sequence[Curve]], target: float) -> None:
    axes.axhline(target, color=_GREY, linewidth=0.8, linestyle="--")
    for (store, curves), colour in zip(curves_of.items(), run_colours(list(curves_of)), strict=True):
        if not (drawn := [curve for curve in curves if curve]):
            continue
        seconds, low, middle, high = band(drawn)
        axes.fill_between(seconds, low, high, color=colour, alpha=0.16, linewidth=0)
        axes.plot(seconds, middle, color=colour, linewidth=1.8, label=store)
        reached = median_time(drawn, target)
        if math.isfinite(reached):
            axes.plot([reached], [target], "o", markersize=7, color=colour, markerfacecolor="white", zorder=4)
    axes.set(title=title, xlabel="seconds", ylim=(0, 1.02))
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def band(curves: Sequence[Curve]) -> tuple[Floats, Floats, Floats, Floats]:
    """Return times, and the lowest, the median and the highest value of the curves there.

    The times go from the last start of a curve to the last end of one. A curve that has ended keeps its last value,
    because its run stopped when it had reached the target.
    """
    start = max(curve[0][0] for curve in curves)
    end = max(curve[-1][0] for curve in curves)
    seconds = np.linspace(start, max(start, end), _GRID_POINTS)
    values = np.stack([_values_at(curve, seconds) for curve in curves])
    return seconds, values.min(axis=0), np.median(values, axis=0), values.max(axis=0)


def _values_at(curve: Curve, seconds: Floats) -> Floats:
    times, values = np.asarray(curve, dtype=np.float64).T
    return np.asarray(np.interp(seconds, times, values), dtype=np.float64)


def median_time(curves: Sequence[Curve], target: float) -> float:
    """Return the median of the times of the first value at or above the target; infinite where there is none."""
    times = [next((seconds for seconds, value in curve if value >= target), math.inf) for curve in curves]
    return float(np.median(times))
