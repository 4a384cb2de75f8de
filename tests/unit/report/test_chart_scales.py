"""Ticks, texts of numbers, and lines with a limited number of points."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.report.charts.chart import axis, axis_of
from echelon.report.charts.scales import byte_count, duration, evenly, nice_ticks, number, thin

FLOATS = st.floats(-1e6, 1e6)


@given(FLOATS, st.floats(1e-3, 1e6), st.booleans())
def test_ticks_are_few_and_inside(low: float, width: float, whole: bool) -> None:
    ticks = nice_ticks(low, low + width, whole=whole)
    margin = 1e-6 * (abs(low) + width)
    assert len(ticks) <= 8
    assert all(low - margin <= tick <= low + width + margin for tick in ticks)
    assert ticks == sorted(set(ticks))
    if whole:
        assert all(tick == round(tick) for tick in ticks)


def test_an_axis_of_one_value_or_none_still_has_a_width() -> None:
    for made in (axis("x", 3.0, 3.0), axis("x", math.nan, math.inf), axis_of("x", []), axis_of("x", [math.nan, 0.0])):
        assert made.high > made.low
        assert math.isfinite(made.part(made.low))


def test_an_axis_is_logarithmic_if_small_values_would_not_be_seen() -> None:
    logarithmic = axis_of("loss", [0.003, 3.0, math.nan], may_be_log=True)
    assert (logarithmic.low, logarithmic.high, logarithmic.log) == (0.001, 10.0, True)
    assert logarithmic.part(0.1) == pytest.approx(0.5)
    assert not axis_of("loss", [0.0, 3.0], may_be_log=True).log
    assert not axis_of("rate", [0.003, 3.0]).log


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.98333, "0.9833"),
        (12345.6, "12,346"),
        (0.0, "0"),
        (1e-7, "1e-7"),
        (2.5, "2.5"),
        (100.0, "100"),
        (-0.5, "-0.5"),
        (None, "–"),
        (math.nan, "NaN"),
        (math.inf, "∞"),
        (-math.inf, "−∞"),
        (3.14e12, "3.14e12"),
    ],
)
def test_numbers_are_short(value: float | None, text: str) -> None:
    assert number(value) == text


def test_durations_and_bytes_have_units() -> None:
    assert [duration(s) for s in (0.0212, 2.35, 130, 7500)] == ["21.2 ms", "2.35 s", "2 min 10 s", "2 h 05 min"]
    assert [byte_count(b) for b in (0, 999, 59_600_000, 3.2e15)] == ["0 B", "999 B", "59.6 MB", "3,200 TB"]


def test_a_thinned_line_keeps_its_ends_its_spikes_and_its_gaps() -> None:
    points = [(float(i), 1.0) for i in range(100_000)]
    points[40_000] = (40_000.0, 9.0)
    points[70_000] = (70_000.0, math.nan)
    kept = thin(points, 240)
    assert len(kept) <= 250
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert points[40_000] in kept
    assert any(math.isnan(y) for _, y in kept)
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)


@given(st.lists(st.tuples(FLOATS, st.floats()), max_size=300), st.integers(3, 50))
def test_thinning_never_fails_and_stays_small(points: list[tuple[float, float]], most: int) -> None:
    assert len(thin(points, most)) <= max(most, 2) + 5


def test_evenly_keeps_the_first_and_the_last() -> None:
    assert evenly(range(100), 5) == [0, 25, 50, 74, 99]
    assert evenly([1, 2], 5) == [1, 2]
