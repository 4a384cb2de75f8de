"""Each kind of chart as SVG. A dot is a line of length 0 with round ends; a tooltip is a `<title>` element."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import assert_never

from echelon.report.charts.chart import Axis, Bars, Cell, Chart, Lane, Lanes, Line, Lines, Part, Stacks, axis
from echelon.report.charts.scales import evenly, number
from echelon.report.page.data_tables import chart_rows
from echelon.report.page.frame import SIZE, coordinate, css_colour, frame, legend
from echelon.report.page.html import Html, element, join
from echelon.report.page.tables import table

MOST_TOOLTIPS = 60  # per line
MOST_BAR_LABELS = 12
ROW_GAP = 0.14  # of a row, above and below its bar


def figure(chart: Chart) -> Html:
    """Return a chart with its title, its legend, its drawing, and its values as a table that can be unfolded."""
    headings, rows = chart_rows(chart)
    return element(
        "figure",
        element("figcaption", element("strong", chart.title), legend(chart)),
        draw(chart),
        element("p", chart.note, class_="note") if chart.note else None,
        element("details", element("summary", "Values"), table(headings, rows), class_="values"),
        class_=f"chart {type(chart).__name__.lower()}",
    )


def draw(chart: Chart) -> Html:
    """Return the drawing of a chart with its axes."""
    match chart:
        case Lines():
            return _lines(chart)
        case Bars():
            return _bars(chart)
        case Stacks():
            return _stacks(chart)
        case Lanes():
            return _lanes(chart)
        case _:
            assert_never(chart)


def _shape(kind: str, d: str, tooltip: str | None = None, *, fill: str = "", stroke: str = "") -> Html:
    title = () if tooltip is None else (element("title", tooltip),)
    return element(
        "path",
        *title,
        d=d,
        class_=kind or None,
        fill=css_colour(fill) if fill else None,
        stroke=css_colour(stroke) if stroke else None,
    )


def _moment(x: Axis, at: float, words: str) -> Html:
    place = coordinate(min(1.0, max(0.0, x.part(at))) * SIZE)
    return _shape("moment", f"M{place} 0V{SIZE}", words)


# --- lines


def _lines(chart: Lines) -> Html:
    parts: list[Html] = []
    for band in chart.bands:
        around = [(x, high) for x, _, high in band.points] + [(x, low) for x, low, _ in reversed(band.points)]
        places = "L".join(_place(chart, x, y) for x, y in around)
        parts.append(_shape("band", f"M{places}Z", fill=band.colour))
    parts += [_moment(chart.x, x, words) for x, words in chart.moments]
    for line in sorted(chart.lines, key=lambda line: not line.faint):  # faint lines lie behind the others
        kind = "line faint" if line.faint else "line"
        parts.append(_shape(kind, _line_path(chart, line), stroke=line.colour))
    for line in chart.lines:
        parts += _dots(chart, line)
    return frame(chart, join(*parts), chart.x, chart.y)


def _place(chart: Lines, x: float, y: float) -> str:
    across, up = (min(1.0, max(0.0, part)) for part in (chart.x.part(x), chart.y.part(y)))
    return f"{coordinate(across * SIZE)} {coordinate(SIZE - up * SIZE)}"


def _line_path(chart: Lines, line: Line) -> str:
    """Return the path. It starts again after a value that is not finite."""
    d, drawing = "", False
    for x, y in line.points:
        if not (math.isfinite(x) and math.isfinite(y)):
            drawing = False
            continue
        place = _place(chart, x, y)
        if drawing and line.steps:
            d += "H{}V{}".format(*place.split())
        else:
            d += f"{'L' if drawing else 'M'}{place}"
        drawing = True
    return d


def _dots(chart: Lines, line: Line) -> list[Html]:
    """Return tooltips for points of a line. Dots that are no marks appear only under the pointer."""
    finite = [point for point in line.points if math.isfinite(point[1])]
    visible = line.marks or len(finite) == 1
    return [
        _shape(
            "dot" if visible else "dot hidden",
            f"M{_place(chart, x, y)}h.01",
            f"{line.label}: {number(y)} at {number(x)}, {chart.x.label}",
            stroke=line.colour,
        )
        for x, y in evenly(finite, MOST_TOOLTIPS)
    ]


# --- bars


def _bars(chart: Bars) -> Html:
    total = sum(value for _, value in chart.bars) or 1.0
    y = axis(chart.unit, 0.0, max((value for _, value in chart.bars), default=1.0) * 1.06 or 1.0, count=4)
    width = SIZE / max(1, len(chart.bars))
    parts = []
    for index, (label, value) in enumerate(chart.bars):
        left, right = (coordinate((index + part) * width) for part in (0.12, 0.88))
        d = f"M{left} {SIZE}V{coordinate(SIZE - y.part(value) * SIZE)}H{right}V{SIZE}Z"
        tooltip = f"{label}: {number(value)} {chart.unit} ({value / total:.1%})"
        parts.append(_shape("bar", d, tooltip, fill=chart.colour))
    if chart.bound is not None:
        parts.append(_shape("bound", f"M{coordinate((chart.bound[0] + 1) * width)} 0V{SIZE}", chart.bound[1]))
    most = MOST_BAR_LABELS if all(len(label) < 4 for label, _ in chart.bars) else MOST_BAR_LABELS // 2
    every = max(1, math.ceil(len(chart.bars) / most))
    ticks = tuple((index + 0.5, label) for index, (label, _) in enumerate(chart.bars) if index % every == 0)
    x = Axis(chart.label, 0.0, float(max(1, len(chart.bars))), ticks)
    return frame(chart, join(*parts), x, y, x_grid=False)


# --- rows: stacked bars and lanes of time


def _row_px(count: int, few: int) -> int:
    """Return the height of a row: `few` for up to eight rows, less for more."""
    return few if count <= 8 else (20 if count <= 24 else 15)


def _row_edges(index: int, count: int) -> tuple[float, float]:
    height = SIZE / count
    return (index + ROW_GAP) * height, (index + 1 - ROW_GAP) * height


def _box(left: float, top: float, right: float, bottom: float) -> str:
    return f"M{coordinate(left)} {coordinate(top)}H{coordinate(right)}V{coordinate(bottom)}H{coordinate(left)}Z"


def _stacks(chart: Stacks) -> Html:
    parts = []
    for index, row in enumerate(chart.rows):
        top, bottom = _row_edges(index, len(chart.rows))
        whole, at = sum(row.values) or 1.0, 0.0
        for part, value in zip(chart.parts, row.values, strict=True):
            left, right = (chart.x.part(x) * SIZE for x in (at, at + value))
            at += value
            if right - left > 0.2:
                tooltip = f"{row.label}: {part.label} {number(value)} {chart.unit} ({value / whole:.0%})"
                parts.append(_shape("", _box(left, top, right, bottom), tooltip, fill=part.colour))
    names = [row.label for row in chart.rows]
    return frame(chart, join(*parts), chart.x, None, rows=names, row_px=_row_px(len(names), 28))


def _lanes(chart: Lanes) -> Html:
    parts: list[Html] = []
    for index, lane in enumerate(chart.lanes):
        top, bottom = _row_edges(index, len(chart.lanes))
        shapes = [*_cells(chart, lane, top, bottom), *_steps(chart, lane, top, bottom)]
        title = element("title", lane.text) if lane.cells else None
        parts.append(element("g", title, *shapes))
    parts += [_moment(chart.x, at, words) for at, words in chart.moments]
    names = [lane.label for lane in chart.lanes]
    return frame(chart, join(*parts), chart.x, None, rows=names, row_px=_row_px(len(names), 36))


def _cells(chart: Lanes, lane: Lane, top: float, bottom: float) -> list[Html]:
    """Return one shape per part, the last part first.

    Each covers the share of its part and of those before it, so that the next shape hides the rest of it.
    """
    shapes = []
    for part in reversed(range(len(chart.parts))):
        if any(cell.shares[part] > 0.001 for cell in lane.cells):
            heights = [(cell, bottom - sum(cell.shares[: part + 1]) * (bottom - top)) for cell in lane.cells]
            shapes.append(_shape("", _staircase(chart.x, heights, bottom), fill=chart.parts[part].colour))
    return shapes


def _staircase(x: Axis, heights: Sequence[tuple[Cell, float]], bottom: float) -> str:
    """Return the area under cells with these upper edges. It is interrupted where cells are missing."""
    d, end, floor = "", None, coordinate(bottom)
    for cell, edge in heights:
        left, right = (coordinate(x.part(at) * SIZE) for at in (cell.begin, cell.end))
        if end is not None and end != left:
            d += f"V{floor}Z"
            end = None
        if end is None:
            d += f"M{left} {floor}"
        d += f"V{coordinate(edge)}H{right}"
        end = right
    return f"{d}V{floor}Z" if d else ""


def _steps(chart: Lanes, lane: Lane, top: float, bottom: float) -> list[Html]:
    def shape(part: Part, begin: float, end: float) -> Html:
        left, right = chart.x.part(begin) * SIZE, chart.x.part(end) * SIZE
        return _shape("", _box(left, top, right, bottom), fill=part.colour)

    return [
        element(
            "g",
            element("title", step.text),
            *(shape(chart.parts[one.part], one.begin, one.end) for one in step.segments),
        )
        for step in lane.steps
    ]
