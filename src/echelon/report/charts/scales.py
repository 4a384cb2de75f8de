"""Axes and numbers: ticks, units of time and bytes, and lines with a limited number of points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias, TypeVar

Point: TypeAlias = tuple[float, float]
T = TypeVar("T")

_NICE = (1.0, 2.0, 2.5, 5.0, 10.0)


def unit_of_time(seconds: float) -> tuple[float, str]:
    """Return the seconds in the unit of a time axis, and the unit's name."""
    if seconds < 300:
        return 1.0, "s"
    return (60.0, "min") if seconds < 3 * 3600 else (3600.0, "h")


def nice_ticks(low: float, high: float, count: int = 5, *, whole: bool = False) -> list[float]:
    """Return about `count` round numbers from `low` to `high`; with `whole`, only whole ones."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low] if math.isfinite(low) else []
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * nice for nice in _NICE if power * nice >= rough * 0.8)
    if whole:
        step = float(math.ceil(step))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return the powers of ten from `low` to `high`, at most about five."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    every = max(1, math.ceil((last - first + 1) / 5))
    return [10.0**exponent for exponent in range(first, last + 1, every)]


def number(value: float | None, digits: int = 4) -> str:
    """Return a number with so many significant digits, as few letters as possible; "–" for none, NaN by its name."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("∞" if value > 0 else "−∞")
    if value and not 1e-4 <= abs(value) < 1e9:
        mantissa, _, exponent = f"{value:.{max(1, digits - 2)}e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    if abs(value) >= 10 ** (digits - 1) or float(value).is_integer():
        return f"{value:,.0f}"
    decimals = digits - 1 - math.floor(math.log10(abs(value))) if value else 0
    text = f"{value:.{min(decimals, 6)}f}"
    return text.rstrip("0").rstrip(".")


def byte_count(value: float) -> str:
    """Return a number of bytes in B, kB, MB, GB or TB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{number(value, 3)} {unit}"
        value /= 1000
    return f"{number(value, 3)} TB"


def duration(seconds: float) -> str:
    """Return a duration as a person says it: 340 ms, 12.5 s, 3 min 20 s, 2 h 05 min."""
    if not math.isfinite(seconds):
        return "–"
    if seconds < 1:
        return f"{number(seconds * 1000, 3)} ms"
    if seconds < 100:
        return f"{number(seconds, 3)} s"
    if seconds < 3600:
        return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"
    return f"{int(seconds) // 3600} h {int(seconds) % 3600 // 60:02d} min"


def thin(points: Sequence[Point], most: int) -> list[Point]:
    """Return at most about `most` of the points: of each stretch the lowest and the highest, and the two ends.

    Spikes stay visible. A stretch with a value that is not finite keeps one such point, which is a gap in the line.
    """
    if len(points) <= most:
        return list(points)
    per_stretch = max(3, math.ceil(3 * len(points) / most))
    kept = {0, len(points) - 1}
    for begin in range(0, len(points), per_stretch):
        stretch = range(begin, min(begin + per_stretch, len(points)))
        finite = [index for index in stretch if math.isfinite(points[index][1])]
        if finite:
            kept |= {min(finite, key=lambda i: points[i][1]), max(finite, key=lambda i: points[i][1])}
        if len(finite) < len(stretch):
            kept.add(next(index for index in stretch if not math.isfinite(points[index][1])))
    return [points[index] for index in sorted(kept)]


def evenly(values: Sequence[T], most: int) -> list[T]:
    """Return at most `most` of the values, at equal distances, with the first and the last."""
    if len(values) <= most:
        return list(values)
    return [values[round(index * (len(values) - 1) / (most - 1))] for index in range(most)]
