"""How the templates of the page write numbers, and arrange what they show."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from echelon.dash.snapshot import Curve, Mean, Worker
from echelon.report.terminal.lines import bytes_text, duration, ranges
from echelon.report.terminal.status import BAD

NONE = "–"


def integer(value: float | None) -> str:
    """Return a count with narrow spaces between thousands."""
    return NONE if value is None else f"{value:,.0f}".replace(",", "\u202f")


def decimal(value: float | None, digits: int = 4) -> str:
    """Return a metric with a fixed number of digits."""
    return NONE if value is None else f"{value:.{digits}f}"


def percent(fraction: float | None) -> str:
    """Return a part of a whole."""
    return NONE if fraction is None else f"{fraction:.0%}"


def seconds(value: float | None) -> str:
    """Return a short time with two or three digits: `0.4 ms`, `61 ms`, `1.2 s`."""
    if value is None:
        return NONE
    if value < 0.01:
        return f"{value * 1e3:.1f} ms"
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.1f} s"


def clock(value: float | None) -> str:
    """Return a long time as `12:34`."""
    return NONE if value is None else duration(value)


def size(value: float | None) -> str:
    """Return a number of bytes with its unit."""
    return NONE if value is None else bytes_text(value)


def mean(value: Mean) -> str:
    """Return a mean and, in brackets, the largest value."""
    return f"{value.mean:.1f} ({value.largest})" if value.steps else NONE


def last_number(values: Sequence[float | None]) -> str:
    """Return the latest of some measurements."""
    return decimal(next((value for value in reversed(values) if value is not None), None))


def last_rows(curve: Curve, epochs: Sequence[float | None], most: int = 10) -> list[dict[str, float | None]]:
    """Return the latest points of a curve as rows, the latest first."""
    rows = zip(curve.seconds, epochs, curve.accuracy, curve.loss, strict=True)
    return [dict(zip(("seconds", "epoch", "accuracy", "loss"), row, strict=True)) for row in rows][: -most - 1 : -1]


def parts(seconds_by_phase: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return where each phase begins in a bar of the length 1, and its length."""
    total = sum(seconds_by_phase.values())
    ends = accumulate(seconds_by_phase.values())
    return [
        {"name": name, "start": (end - value) / total, "part": value / total}
        for (name, value), end in zip(seconds_by_phase.items(), ends, strict=True)
        if total
    ]


def groups(workers: Sequence[Worker]) -> list[dict[str, Any]]:
    """Return the workers by group; without groups there is one, whose number is None."""
    found: dict[int | None, list[Worker]] = {}
    for worker in workers:
        found.setdefault(worker.group, []).append(worker)
    numbers = sorted(found, key=lambda number: -1 if number is None else number)
    return [
        {
            "number": number,
            "workers": found[number],
            "ranks": ranges(worker.rank for worker in found[number]),
            "clocks": _clocks(found[number]),
        }
        for number in numbers
    ]


def _clocks(workers: Sequence[Worker]) -> str:
    clocks = [worker.clock for worker in workers if worker.tone != BAD] or [worker.clock for worker in workers]
    first, last = min(clocks), max(clocks)
    return integer(first) if first == last else f"{integer(first)}–{integer(last)}"


FILTERS: dict[str, Callable[..., Any]] = {
    "integer": integer,
    "decimal": decimal,
    "percent": percent,
    "seconds": seconds,
    "clock": clock,
    "size": size,
    "mean": mean,
    "last_number": last_number,
    "last_rows": last_rows,
    "parts": parts,
    "groups": groups,
}
