"""The values of a chart as a table, and its contents as a sentence, for readers who do not see the drawing."""

from __future__ import annotations

import math
from typing import assert_never

from echelon.report.charts.chart import Bars, Chart, Lanes, Lines, Stacks
from echelon.report.charts.scales import evenly, number

MOST_ROWS = 24
MOST_PARTS = 8  # of a sentence

Rows = list[list[str]]


def chart_sentence(chart: Chart) -> str:
    """Return what a chart shows."""
    match chart:
        case Lines():
            lines = "; ".join(_line_sentence(line.label, [y for _, y in line.points]) for line in chart.lines)
            return f"{chart.title}. {lines}."
        case Bars():
            largest = max(chart.bars, key=lambda bar: bar[1], default=("", 0.0))
            bound = f"; {chart.bound[1]}" if chart.bound else ""
            return f"{chart.title}: {chart.unit} by {chart.label}. Most: {largest[0]}, {number(largest[1])}{bound}."
        case Stacks():
            rows = [f"{row.label} {number(sum(row.values))} {chart.unit}" for row in chart.rows]
            return f"{chart.title}. {_first(rows)}."
        case Lanes():
            return f"{chart.title}. {_first([lane.text for lane in chart.lanes])}."
        case _:
            assert_never(chart)


def _first(parts: list[str]) -> str:
    more = f"; {len(parts) - MOST_PARTS} more are in the table" if len(parts) > MOST_PARTS else ""
    return "; ".join(parts[:MOST_PARTS]) + more


def _line_sentence(label: str, values: list[float]) -> str:
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return f"{label}: no finite value"
    ends = f"from {number(finite[0])} to {number(finite[-1])}"
    return f"{label}: {ends}, lowest {number(min(finite))}, highest {number(max(finite))}"


def chart_rows(chart: Chart) -> tuple[list[str], Rows]:
    """Return the headings and the rows of the table of a chart."""
    match chart:
        case Lines():
            return _line_rows(chart)
        case Bars():
            total = sum(value for _, value in chart.bars) or 1.0
            rows = [[label, number(value), f"{value / total:.1%}"] for label, value in chart.bars]
            return [chart.label, chart.unit, "share"], rows
        case Stacks():
            headings = ["", *(f"{part.label} ({chart.unit})" for part in chart.parts)]
            return headings, [[row.label, *map(number, row.values)] for row in chart.rows]
        case Lanes():
            return ["worker", "in this chart"], [[lane.label, lane.text.partition(": ")[2]] for lane in chart.lanes]
        case _:
            assert_never(chart)


def _line_rows(chart: Lines) -> tuple[list[str], Rows]:
    """Return one row per x, at most MOST_ROWS; the value of a line is that of its nearest point at or before x."""
    xs = evenly(sorted({x for line in chart.lines for x, _ in line.points}), MOST_ROWS)
    rows = []
    for x in xs:
        values = []
        for line in chart.lines:
            before = [y for at, y in line.points if at <= x]
            values.append(number(before[-1]) if before and x <= line.points[-1][0] else "")
        rows.append([number(x), *values])
    return [chart.x.label, *(line.label for line in chart.lines)], rows
