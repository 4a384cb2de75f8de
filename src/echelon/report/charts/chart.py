"""The kinds of chart: lines, bars, stacked bars and lanes of time. A chart holds values, not their drawing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from echelon.report.charts.scales import Point, log_ticks, nice_ticks, number

LOG_RATIO = 100.0  # of the highest and the lowest value: beyond it, small values cannot be told apart on a linear axis


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis from `low` to `high`. `ticks` are values and their texts."""

    label: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False

    def part(self, value: float) -> float:
        """Return where a value lies: 0 at the low end, 1 at the high end."""
        if self.log:
            low, high = math.log10(self.low), math.log10(self.high)
            return (math.log10(max(value, self.low)) - low) / (high - low)
        return (value - self.low) / (self.high - self.low)


def axis(label: str, low: float, high: float, *, count: int = 5, log: bool = False, whole: bool = False) -> Axis:
    """Return an axis with round numbers as ticks, with `whole` only whole ones. An empty range is widened."""
    if not (math.isfinite(low) and math.isfinite(high)):
        low, high = 0.0, 1.0
    if log:
        low, high = 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high) + 1e-9)
        high = high if high > low else low * 10
        ticks = tuple((tick, number(tick)) for tick in log_ticks(low, high))
        return Axis(f"{label}, logarithmic", low, high, ticks, log=True)
    if high <= low:
        high = low + 1.0
    return Axis(label, low, high, tuple((tick, number(tick)) for tick in nice_ticks(low, high, count, whole=whole)))


def axis_of(label: str, values: Sequence[float], *, may_be_log: bool = False) -> Axis:
    """Return an axis from 0 to a little above the highest finite value; logarithmic if it may be and helps."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    if may_be_log and 0 < low < high / LOG_RATIO:
        return axis(label, low, high, log=True)
    return axis(label, min(0.0, low), high * 1.05 if high > 0 else 1.0)


@dataclass(frozen=True, slots=True)
class Line:
    """A line through points; a value that is not finite is a gap. `faint` lines are drawn thin, behind the others."""

    label: str
    points: tuple[Point, ...]
    colour: str
    faint: bool = False
    steps: bool = False  # a staircase, for counts
    marks: bool = False  # a dot at every point, for single measurements


@dataclass(frozen=True, slots=True)
class Band:
    """An area between two values over x."""

    label: str
    points: tuple[tuple[float, float, float], ...]  # x, low, high
    colour: str


@dataclass(frozen=True, slots=True)
class Lines:
    """A chart of lines. `moments` are vertical lines: an x and its text."""

    key: str
    title: str
    x: Axis
    y: Axis
    lines: tuple[Line, ...]
    bands: tuple[Band, ...] = ()
    moments: tuple[tuple[float, str], ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class Bars:
    """A histogram: one bar per label. `bound` is drawn after the bar with this index."""

    key: str
    title: str
    label: str  # of the axis below the bars
    unit: str  # of the values
    bars: tuple[tuple[str, float], ...]
    colour: str
    bound: tuple[int, str] | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """A kind of time, in every bar and lane of one chart."""

    label: str
    colour: str


@dataclass(frozen=True, slots=True)
class Stack:
    """One horizontal bar of several parts, in the order of the parts of the chart."""

    label: str
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Stacks:
    """Horizontal stacked bars: one row per worker, for example."""

    key: str
    title: str
    x: Axis
    parts: tuple[Part, ...]
    rows: tuple[Stack, ...]
    unit: str = "s"
    note: str = ""


@dataclass(frozen=True, slots=True)
class Cell:
    """A stretch of a lane: from `begin` to `end`, with the share of each part; what is missing to 1 is not recorded."""

    begin: float
    end: float
    shares: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """One part of a step: which part, from when to when."""

    part: int
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Step:
    """A step in a lane: its segments in the order of time, and a sentence."""

    text: str
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Lane:
    """One row of a timeline. It has either cells, for long times, or steps. `text` describes the whole lane."""

    label: str
    text: str
    cells: tuple[Cell, ...] = ()
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True, slots=True)
class Lanes:
    """A timeline: one lane per worker. `moments` are vertical lines: an x and its text."""

    key: str
    title: str
    x: Axis
    parts: tuple[Part, ...]
    lanes: tuple[Lane, ...]
    moments: tuple[tuple[float, str], ...] = field(default=())
    note: str = ""


Chart = Lines | Bars | Stacks | Lanes
