"""How a server measures the own time of each worker."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.server.shard.arrivals import RECENT, Arrivals


def in_lock_step(own: list[float], steps: int, transfer: float = 0.0) -> Arrivals:
    """Return the arrivals of workers that all wait for the slowest one, at each clock."""
    arrivals = Arrivals(lambda worker: 0)
    now = 0.0
    for clock in range(steps):
        for worker, seconds in sorted(enumerate(own), key=lambda pair: pair[1]):
            arrivals.pushed(worker, clock, now + seconds / 2)  # the first bucket, during backward
            arrivals.pushed(worker, clock, now + seconds + transfer)
        now += max(own) + transfer
        for worker in range(len(own)):
            arrivals.answered(worker, now)
    return arrivals


def test_in_lock_step_the_slow_worker_has_the_longest_own_time() -> None:
    report = in_lock_step([0.02, 0.02, 0.06, 0.02], steps=20).report()
    assert [report[str(worker)]["own_s"] for worker in range(4)] == pytest.approx([0.02, 0.02, 0.06, 0.02])
    assert [report[str(worker)]["clock"] for worker in range(4)] == [20] * 4
    assert report["2"]["late_s"] == pytest.approx(0.02), "half of its own time later than half of the others'"
    assert report["0"]["late_s"] == 0.0


def test_an_occasional_long_step_does_not_count() -> None:
    arrivals = Arrivals(lambda worker: worker)
    now = 0.0
    for clock in range(40):
        now += 5.0 if clock % 10 == 3 else 0.02  # a validation
        arrivals.pushed(0, clock, now)
        arrivals.answered(0, now)
    assert arrivals.report()["0"]["own_s"] == pytest.approx(0.02)


def test_a_worker_without_two_steps_has_no_time_yet() -> None:
    arrivals = Arrivals(lambda worker: 0)
    arrivals.pushed(3, 0, 1.0)
    assert arrivals.report() == {"3": {"clock": 1, "own_s": None, "late_s": 0.0}}
    arrivals.answered(7, 1.0)  # it never pushed: it only reads
    arrivals.remove(3)
    assert arrivals.report() == {}


def test_workers_of_different_groups_are_not_compared() -> None:
    arrivals = Arrivals(lambda worker: worker // 2)
    for worker, at in ((0, 1.0), (1, 1.5), (2, 9.0), (3, 9.25)):
        arrivals.pushed(worker, 0, at)
    assert [one["late_s"] for one in arrivals.report().values()] == [0.0, 0.5, 0.0, 0.25]


@given(
    own=st.lists(st.floats(0.001, 1.0), min_size=1, max_size=6),
    steps=st.integers(3, 2 * RECENT),
    transfer=st.floats(0.0, 0.1),
)
def test_the_own_time_does_not_depend_on_the_others(own: list[float], steps: int, transfer: float) -> None:
    report = in_lock_step(own, steps, transfer).report()
    for worker, seconds in enumerate(own):
        assert report[str(worker)]["own_s"] == pytest.approx(seconds + transfer, abs=2e-6)
