"""Speedup and efficiency of weak and strong scaling."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.report.tables.scaling import Point, Scaled, scaling

COUNTS = st.lists(st.integers(1, 64), min_size=1, max_size=6, unique=True)


@given(COUNTS, st.floats(0.1, 1000.0))
def test_perfect_weak_scaling_has_constant_batch_times(counts: list[int], time_ms: float) -> None:
    points = [Point(count, time_ms, 8000 * count / time_ms) for count in counts]
    for point, scaled in zip(points, scaling(points, weak=True), strict=True):
        assert scaled.speedup == pytest.approx(point.count / min(counts))
        assert scaled.efficiency_percent == pytest.approx(100)


@given(COUNTS, st.floats(0.1, 1000.0))
def test_perfect_strong_scaling_divides_batch_times(counts: list[int], time_ms: float) -> None:
    points = [Point(count, time_ms / count, 8000 * count / time_ms) for count in counts]
    for point, scaled in zip(points, scaling(points, weak=False), strict=True):
        assert scaled.speedup == pytest.approx(point.count / min(counts))
        assert scaled.efficiency_percent == pytest.approx(100)


def test_the_formulas_are_those_of_dlbs() -> None:
    points = [Point(1, 10.0, 100.0), Point(4, 12.5, 320.0)]
    assert scaling(points, weak=True) == [Scaled(1, 1.0, 100.0), Scaled(4, 3.2, 80.0)]
    assert scaling([Point(1, 10.0, 100.0), Point(4, 5.0, 200.0)], weak=False)[1] == Scaled(4, 2.0, 50.0)
    assert scaling([], weak=True) == []


def test_more_than_100_percent_is_not_hidden() -> None:
    assert scaling([Point(1, 10.0, 100.0), Point(2, 8.0, 250.0)], weak=True)[1].efficiency_percent == 125.0
