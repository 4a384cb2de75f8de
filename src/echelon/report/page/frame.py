"""The frame of a chart: the axes, the grid, the legend.

The drawing is SVG that stretches with the page: its coordinates go from 0 to SIZE both ways, and strokes keep their
width. The labels around it are HTML text, whose size stays the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from echelon.report.charts.chart import Axis, Bars, Chart, Lanes, Lines, Stacks
from echelon.report.colours import BOUND, GREY
from echelon.report.page.data_tables import chart_sentence
from echelon.report.page.html import Html, element

SIZE = 1000


def frame(
    chart: Chart,
    content: Html,
    x: Axis,
    y: Axis | None,
    *,
    rows: Sequence[str] = (),
    row_px: int = 0,
    x_grid: bool = True,
) -> Html:
    """Return a drawing with its axes. Instead of a y-axis, a chart may have named rows of `row_px` pixels."""
    svg = element(
        "svg",
        element("path", d=_grid(x if x_grid else None, y), class_="rule"),
        content,
        viewBox=f"0 0 {SIZE} {SIZE}",
        preserveAspectRatio="none",
        role="img",
        aria_label=chart_sentence(chart),
    )
    height = f"height:{row_px * len(rows)}px" if rows else None
    if y is not None:
        left = element("div", *(_tick(y, value, label, "bottom") for value, label in y.ticks), class_="y-ticks")
    else:
        names = (element("span", name, style=f"height:{row_px}px;line-height:{row_px}px") for name in rows)
        left = element("div", *names, class_="rows")
    return element(
        "div",
        element("div", y.label, class_="y-label") if y is not None else None,
        left,
        element("div", svg, class_="area", style=height),
        element("div", *(_tick(x, value, label, "left") for value, label in x.ticks), class_="x-ticks"),
        element("div", x.label, class_="x-label"),
        class_="plot",
    )


def legend(chart: Chart) -> Html | None:
    """Return what the colours of a chart mean."""
    entries: list[tuple[str, str, str]] = []
    if isinstance(chart, Lines):
        several = sum(line.faint for line in chart.lines) > 1  # then the note of the chart says what they are
        shown = [line for line in chart.lines if not (line.faint and several)]
        entries = [(line.label, line.colour, "faint" if line.faint else "line") for line in shown]
        entries += [(band.label, band.colour, "area") for band in chart.bands]
    elif isinstance(chart, Stacks | Lanes):
        used = _used_parts(chart)
        entries = [(part.label, part.colour, "area") for index, part in enumerate(chart.parts) if index in used]
    if isinstance(chart, Lines | Lanes) and chart.moments:
        entries.append(("a worker left or joined again", GREY, "dashes"))
    if isinstance(chart, Bars) and chart.bound is not None:
        entries.append((chart.bound[1], BOUND, "dashes"))
    if not entries:
        return None
    items = (
        element("li", element("span", class_=f"key {kind}", style=f"--k:{css_colour(value)}"), label)
        for label, value, kind in entries
    )
    return element("ul", *items, class_="legend")


def css_colour(value: str) -> str:
    """Return the CSS variable of a colour, which has another value on a dark page."""
    return f"var(--{css_name(value)})"


def css_name(value: str) -> str:
    """Return the name of the CSS variable of a colour."""
    return f"c{value.removeprefix('#')}"


def coordinate(value: float) -> str:
    """Return a coordinate with at most one decimal."""
    return f"{value:.1f}".removesuffix(".0")


def _tick(axis: Axis, value: float, label: str, side: str) -> Html:
    return element("span", label, style=f"{side}:{axis.part(value) * 100:.4g}%")


def _grid(x: Axis | None, y: Axis | None) -> str:
    columns = [f"M{coordinate(x.part(value) * SIZE)} 0V{SIZE}" for value, _ in x.ticks] if x is not None else []
    rows = [f"M0 {coordinate(SIZE - y.part(value) * SIZE)}H{SIZE}" for value, _ in y.ticks] if y is not None else []
    return "".join([*columns, *rows])


def _used_parts(chart: Stacks | Lanes) -> set[int]:
    """Return the parts that occur: the legend shows no others."""
    if isinstance(chart, Stacks):
        values: Iterable[Sequence[float]] = (row.values for row in chart.rows)
        segments: set[int] = set()
    else:
        values = (cell.shares for lane in chart.lanes for cell in lane.cells)
        segments = {segment.part for lane in chart.lanes for step in lane.steps for segment in step.segments}
    return segments | {index for row in values for index, value in enumerate(row) if value > 0.001}
