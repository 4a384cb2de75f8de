"""The estimate of the time that a sweep still needs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.bench.dlbs.remaining import seconds_left, shown_left


def test_nothing_is_known_before_the_first_batch() -> None:
    assert seconds_left([], elapsed=3.0, share=0.0, num_after=4) is None


def test_the_first_experiment_is_judged_by_its_batches() -> None:
    assert seconds_left([], elapsed=5.0, share=0.25, num_after=2) == pytest.approx(15 + 2 * 20)


def test_later_ones_by_those_that_have_ended() -> None:
    assert seconds_left([10.0, 20.0], elapsed=5.0, share=0.0, num_after=3) == pytest.approx(10 + 3 * 15)


@given(
    st.lists(st.floats(0.1, 1e4), max_size=5), st.floats(0, 1e5), st.floats(0.01, 1), st.integers(0, 100), st.booleans()
)
def test_the_estimate_is_never_negative_and_never_grows_with_progress(
    finished: list[float], elapsed: float, share: float, num_after: int, started: bool
) -> None:
    left = seconds_left(finished, elapsed, share if started else 0.0, num_after)
    assert left is None or left >= 0
    if finished and started:
        later = seconds_left(finished, elapsed, min(1.0, share + 0.1), num_after)
        assert left is not None
        assert later is not None
        assert later <= left


@pytest.mark.parametrize(("seconds", "text"), [(None, "-:--"), (5.4, "0:05"), (65, "1:05"), (7200, "2:00:00")])
def test_durations_are_short_texts(seconds: float | None, text: str) -> None:
    assert shown_left(seconds) == text
