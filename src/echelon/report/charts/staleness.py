"""Staleness: how many updates of others a step missed, and how many rounds a worker was ahead of the slowest."""

from __future__ import annotations

import math
from collections.abc import Sequence

from echelon.report.charts.chart import Bars, Line, Lines, axis, axis_of
from echelon.report.charts.recorded import RecordedRun
from echelon.report.state.worker import sum_histograms

MOST_BARS = 24  # larger histograms have several values per bar

MISSED, AHEAD = "Updates missed", "Rounds ahead"
_ABOUT = {
    MISSED: "updates of others between a read and its push",
    AHEAD: "rounds ahead of the slowest worker",
}


def staleness_charts(run: RecordedRun, colour: str) -> list[Bars]:
    """Return the histograms of a run. Without a step that missed an update there is nothing to show."""
    missed, ahead = histograms(run)
    if not any(missed):
        return []
    charts = [_bars(MISSED, missed, colour, None)]
    if any(ahead):
        charts.append(_bars(AHEAD, ahead, colour, run.bound))
    return charts


def staleness_overlay(runs: Sequence[RecordedRun], colours: Sequence[str]) -> Lines | None:
    """Return the share of steps by updates missed, one line per run."""
    lines = []
    for run, colour in zip(runs, colours, strict=True):
        missed, _ = histograms(run)
        if total := sum(missed.values()):
            width = bar_width(missed)
            counts = _grouped(missed, width)
            points = tuple((float(index * width), counts.get(index, 0) / total) for index in range(max(counts) + 1))
            lines.append(Line(run.name, (*points, (points[-1][0] + width, 0.0)), colour, steps=True))
    if not any(len(line.points) > 2 for line in lines):
        return None
    x = axis(_ABOUT[MISSED], 0.0, max(line.points[-1][0] for line in lines), whole=True)
    y = axis_of("share of steps", [y for line in lines for _, y in line.points])
    return Lines("staleness", "Updates missed by the steps", x, y, tuple(lines))


def histograms(run: RecordedRun) -> tuple[dict[int, int], dict[int, int]]:
    """Return the steps of all workers by updates missed, and by rounds ahead."""
    workers = run.state.ranked
    return sum_histograms(one.staleness for one in workers), sum_histograms(one.rounds_ahead for one in workers)


def bar_width(histogram: dict[int, int]) -> int:
    """Return how many values share a bar."""
    return max(1, math.ceil((max(histogram, default=0) + 1) / MOST_BARS))


def _grouped(histogram: dict[int, int], width: int) -> dict[int, int]:
    counts: dict[int, int] = {}
    for value, count in histogram.items():
        counts[value // width] = counts.get(value // width, 0) + count
    return counts


def _bars(title: str, histogram: dict[int, int], colour: str, bound: int | None) -> Bars:
    width = bar_width(histogram)
    counts = _grouped(histogram, width)
    last = max(counts) if bound is None else max(*counts, bound // width)
    bars = tuple((_label(index * width, width), float(counts.get(index, 0))) for index in range(last + 1))
    mark = None if bound is None else (bound // width, f"bound {bound}")
    return Bars(title.lower().replace(" ", "-"), title, _ABOUT[title], "steps", bars, colour, mark)


def _label(first: int, width: int) -> str:
    return str(first) if width == 1 else f"{first}–{first + width - 1}"
