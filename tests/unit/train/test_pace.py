"""Artificial stragglers: the same seed gives the same stalls, and steps have the requested duration."""

from __future__ import annotations

import re
import time

import pytest

from echelon.errors import UsageError
from echelon.train.recipe.pace import Pace, Pacer, parse_slow, parse_stall


def test_without_a_pace_steps_have_no_minimum_duration() -> None:
    assert Pace().step_s(0, 0) == 0.0


def test_slow_multiplies_one_worker() -> None:
    pace = Pace(0.5, slow={3: 3.0})
    assert [pace.step_s(rank, 7) for rank in range(5)] == [0.5, 0.5, 0.5, 1.5, 0.5]


def test_stalls_depend_on_the_seed() -> None:
    def steps(pace: Pace) -> list[float]:
        return [pace.step_s(rank, clock) for rank in range(4) for clock in range(100)]

    one = steps(Pace(1.0, stall=(0.1, 5.0), seed=1))
    assert steps(Pace(1.0, stall=(0.1, 5.0), seed=1)) == one
    assert steps(Pace(1.0, stall=(0.1, 5.0), seed=2)) != one
    assert set(one) == {1.0, 5.0}
    assert 20 <= one.count(5.0) <= 60  # a tenth of 400; the seed is fixed, so the test is not flaky
    workers = [one[at : at + 100] for at in range(0, 400, 100)]
    assert len({tuple(worker) for worker in workers}) == 4  # each worker has other stalls


def test_the_stalls_of_a_seed_never_change() -> None:
    """The stalls of a published run can be reproduced."""
    pace = Pace(1.0, stall=(0.3, 2.0), seed=0)
    assert [clock for clock in range(20) if pace.step_s(0, clock) == 2.0] == [1, 3, 8, 10, 11, 16]


def test_stall_and_slow_multiply() -> None:
    assert Pace(0.1, slow={1: 3.0}, stall=(1.0, 5.0)).step_s(1, 0) == pytest.approx(1.5)
    assert Pace(0.1, slow={1: 3.0}, stall=(0.0, 5.0)).step_s(1, 0) == pytest.approx(0.3)


def test_a_step_lasts_as_long_as_its_pace() -> None:
    pacer = Pacer(Pace(0.004), rank=0)
    began = time.perf_counter()
    pacer.begin()
    pacer.hold(0)
    pacer.end()
    assert time.perf_counter() - began >= 0.004


def busy(seconds: float) -> None:
    """Compute for some time, like a backward pass."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_a_step_longer_than_its_pace_is_not_delayed() -> None:
    pacer = Pacer(Pace(0.001), rank=0)
    pacer.begin()
    busy(0.002)
    pacer.hold(0)  # the remaining time is negative


def test_the_wait_leaves_time_for_the_backward_pass() -> None:
    """A fifth of the last backward pass is longer than the whole step here, so there is no wait."""
    pacer = Pacer(Pace(0.003), rank=0)
    pacer.begin()
    pacer.hold(0)
    busy(0.016)
    pacer.end()
    waits = []
    for clock in range(20):  # at least one is not interrupted, even on a busy machine
        pacer.begin()
        began = time.perf_counter()
        pacer.hold(clock)
        waits.append(time.perf_counter() - began)
    assert min(waits) < 0.001


@pytest.mark.parametrize(("text", "slow"), [("3:3", {3: 3.0}), ("0:1.5,2:4", {0: 1.5, 2: 4.0}), ("1:1", {1: 1.0})])
def test_parse_slow(text: str, slow: dict[int, float]) -> None:
    assert parse_slow(text) == slow


@pytest.mark.parametrize(("text", "stall"), [("0.1:5", (0.1, 5.0)), ("0:1", (0.0, 1.0)), ("1:2", (1.0, 2.0))])
def test_parse_stall(text: str, stall: tuple[float, float]) -> None:
    assert parse_stall(text) == stall


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3", "--slow '3' is not RANK:FACTOR, for example 3:3"),
        ("3:3:3", "--slow '3:3:3' is not RANK:FACTOR"),
        ("a:3", "--slow 'a:3' is not RANK:FACTOR"),
        ("0:2,", "--slow '' is not RANK:FACTOR"),
        ("", "--slow '' is not RANK:FACTOR"),
        ("3:0.5", "--slow 3:0.5: the factor must be between 1 and 1,000,000"),
        ("3:-1", "--slow 3:-1: the factor must be between 1 and 1,000,000"),
    ],
)
def test_a_wrong_slow_is_rejected(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        parse_slow(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0.1", "--stall '0.1' is not PROBABILITY:FACTOR, for example 0.1:5"),
        ("often:5", "--stall 'often:5' is not PROBABILITY:FACTOR"),
        ("1.1:5", "--stall 1.1:5: the probability must be between 0 and 1"),
        ("-0.1:5", "--stall -0.1:5: the probability must be between 0 and 1"),
        ("nan:5", "--stall nan:5: the probability must be between 0 and 1"),
        ("0.1:0.9", "--stall 0.1:0.9: the factor must be between 1 and 1,000,000"),
    ],
)
def test_a_wrong_stall_is_rejected(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        parse_stall(text)
