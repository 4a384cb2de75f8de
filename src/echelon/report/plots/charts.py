"""The charts of recorded runs as PNG and SVG files, for papers and slides. The page shows the same charts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import assert_never

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from echelon.report.charts.chart import Axis, Bars, Chart, Lanes, Lines, Stacks
from echelon.report.colours import BOUND, GREY

INCHES = (6.4, 3.8)
WIDE_INCHES = (9.6, 3.8)
ROW_INCHES = 0.3
FORMATS = ("png", "svg")


def write_charts(charts: Iterable[tuple[str, Chart]], folder: Path) -> list[Path]:
    """Write each chart, with the name of its run or "", as PNG and SVG; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for run, chart in charts:
        figure = chart_figure(chart, run)
        for kind in FORMATS:
            path = folder / f"{file_name(run, chart)}.{kind}"
            # Text stays text, so that it can be searched and edited; the fixed salt makes equal charts equal files.
            with rc_context({"svg.fonttype": "none", "svg.hashsalt": "echelon"}):
                figure.savefig(path, dpi=160, metadata={"Date": None} if kind == "svg" else None)
            written.append(path)
    return written


def file_name(run: str, chart: Chart) -> str:
    """Return the name of a chart's files, without what file systems do not allow."""
    words = f"{run}-{chart.key}" if run else chart.key
    return re.sub(r"[^\w.@+-]+", "-", words)


def chart_figure(chart: Chart, run: str = "") -> Figure:
    """Return the drawing of a chart."""
    width, height = WIDE_INCHES if isinstance(chart, Lanes) else INCHES
    rows = len(chart.rows) if isinstance(chart, Stacks) else len(chart.lanes) if isinstance(chart, Lanes) else 0
    figure = Figure(figsize=(width, max(2.2, 1.4 + rows * ROW_INCHES) if rows else height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    _draw(axes, chart)
    axes.set_title(f"{chart.title} ({_plain(run)})" if run else chart.title, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    _legend(figure, axes)
    return figure


def _draw(axes: Axes, chart: Chart) -> None:
    match chart:
        case Lines():
            _lines(axes, chart)
        case Bars():
            _bars(axes, chart)
        case Stacks():
            _stacks(axes, chart)
        case Lanes():
            _lanes(axes, chart)
        case _:
            assert_never(chart)


def _plain(label: str) -> str:
    """Return a label that matplotlib shows as it is: $ would begin a formula, and a leading _ hides it."""
    return label.replace("$", r"\$").removeprefix("_")


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        columns = min(6 if sum(map(len, labels)) < 60 else 4, len(labels))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)


def _set_axis(axes: Axes, axis: Axis, which: str) -> None:
    at, texts = [value for value, _ in axis.ticks], [text for _, text in axis.ticks]
    if which == "x":
        axes.set_xlim(axis.low, axis.high)
        axes.set_xticks(at, texts)
        axes.set_xlabel(axis.label)
    else:
        if axis.log:
            axes.set_yscale("log")
        axes.set_ylim(axis.low, axis.high)
        axes.set_yticks(at, texts)
        axes.set_ylabel(axis.label)


def _moments(axes: Axes, moments: Sequence[tuple[float, str]]) -> None:
    for index, (at, _) in enumerate(moments):
        label = None if index else "a worker left or joined again"
        axes.axvline(at, color=GREY, linewidth=1, linestyle="--", label=label)


def _lines(axes: Axes, chart: Lines) -> None:
    for band in chart.bands:
        x, low, high = zip(*band.points, strict=True)
        axes.fill_between(x, low, high, color=band.colour, alpha=0.22, linewidth=0, label=_plain(band.label))
    for line in chart.lines:
        x, y = zip(*line.points, strict=True)
        axes.plot(
            x,
            y,
            color=line.colour,
            linewidth=1.0 if line.faint else 1.8,
            alpha=0.65 if line.faint else 1.0,
            marker="o" if line.marks or len(line.points) == 1 else "",
            markersize=4,
            drawstyle="steps-post" if line.steps else "default",
            label=_plain(line.label),
        )
    _moments(axes, chart.moments)
    _set_axis(axes, chart.x, "x")
    _set_axis(axes, chart.y, "y")
    axes.grid(alpha=0.3)


def _bars(axes: Axes, chart: Bars) -> None:
    places = list(range(len(chart.bars)))
    axes.bar(places, [value for _, value in chart.bars], color=chart.colour, alpha=0.85)
    every = max(1, -(-len(places) // 12))
    axes.set_xticks(places[::every], [label for label, _ in chart.bars][::every], fontsize=8)
    axes.set(xlabel=chart.label, ylabel=chart.unit)
    if chart.bound is not None:
        axes.axvline(chart.bound[0] + 0.5, color=BOUND, linestyle="--", label=chart.bound[1])


def _stacks(axes: Axes, chart: Stacks) -> None:
    places = list(range(len(chart.rows)))
    left = [0.0] * len(places)
    for index, part in enumerate(chart.parts):
        values = [row.values[index] for row in chart.rows]
        if any(values):
            axes.barh(places, values, left=left, height=0.72, color=part.colour, label=_plain(part.label))
        left = [before + value for before, value in zip(left, values, strict=True)]
    _rows(axes, [row.label for row in chart.rows])
    _set_axis(axes, chart.x, "x")


def _lanes(axes: Axes, chart: Lanes) -> None:
    labelled: set[int] = set()
    for place, lane in enumerate(chart.lanes):
        for index, part in enumerate(chart.parts):
            spans = [(one.begin, one.end - one.begin) for s in lane.steps for one in s.segments if one.part == index]
            label = _plain(part.label) if index not in labelled else None
            if spans:
                axes.broken_barh(spans, (place - 0.36, 0.72), color=part.colour, linewidth=0, label=label)
            if cells := [cell for cell in lane.cells if cell.shares[index] > 0]:
                axes.bar(
                    [cell.begin for cell in cells],
                    [-0.72 * cell.shares[index] for cell in cells],
                    [cell.end - cell.begin for cell in cells],
                    [place + 0.36 - 0.72 * sum(cell.shares[:index]) for cell in cells],
                    align="edge",
                    color=part.colour,
                    linewidth=0,
                    label=label,
                )
            if spans or cells:
                labelled.add(index)
    _moments(axes, chart.moments)
    _rows(axes, [lane.label for lane in chart.lanes])
    _set_axis(axes, chart.x, "x")


def _rows(axes: Axes, labels: Sequence[str]) -> None:
    """Name the rows, the first one at the top."""
    axes.set_yticks(range(len(labels)), labels, fontsize=8 if len(labels) <= 24 else 5)
    axes.set_ylim(len(labels) - 0.4, -0.6)
