"""Turns, statistics and ratios, with contenders that return given times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.bench.harness.turns import Case, Contender, alternate, percentile, ratios, summarise, turn_order
from echelon.errors import UsageError


class Scripted(Contender):
    """Returns given times and logs its calls."""

    def __init__(self, name: str, step_s: float, calls: list[str]) -> None:
        super().__init__(name)
        self._step_s = step_s
        self._calls = calls

    def start(self) -> None:
        self._calls.append(f"start {self.name}")

    def run_round(self, num_steps: int) -> list[float]:
        self._calls.append(f"{self.name} {num_steps}")
        return [float(index) + self._step_s for index in range(num_steps)]

    def stop(self) -> None:
        self._calls.append(f"stop {self.name}")


def case(name: str, *rounds: list[float]) -> Case:
    return summarise({name: [[value / 1e3 for value in one] for one in rounds]})[0]


def test_turns_rotate_and_drop_the_warmup() -> None:
    calls: list[str] = []
    contenders = [Scripted(name, 0.5, calls) for name in "abc"]
    taken = alternate(contenders, rounds=4, steps=2, warmup=1)
    assert [entry[0] for entry in calls] == list("abcbcacababc")
    assert {entry[2:] for entry in calls} == {"3"}
    assert taken == {name: [[1.5, 2.5]] * 4 for name in "abc"}


def test_order_of_one_contender_is_itself() -> None:
    alone = [Scripted("a", 1.0, [])]
    assert turn_order(alone, 7) == alone


def test_a_with_block_stops_the_contender_after_an_error() -> None:
    calls: list[str] = []
    with pytest.raises(KeyError), Scripted("a", 1.0, calls):
        raise KeyError
    assert calls == ["start a", "stop a"]


def test_two_contenders_of_one_name_are_rejected() -> None:
    with pytest.raises(UsageError, match="different names"):
        alternate([Scripted("a", 1.0, []), Scripted("a", 1.0, [])], rounds=1, steps=1, warmup=0)


@pytest.mark.parametrize(("rounds", "steps", "warmup"), [(0, 1, 0), (1, 0, 0), (1, 1, -1)])
def test_numbers_of_steps_that_measure_nothing_are_rejected(rounds: int, steps: int, warmup: int) -> None:
    with pytest.raises(UsageError, match=f"got {rounds}, {steps}, {warmup}"):
        alternate([Scripted("a", 1.0, [])], rounds, steps, warmup)


@pytest.mark.parametrize(("share", "value"), [(0.0, 1.0), (0.1, 1.4), (0.5, 3.0), (0.9, 4.6), (1.0, 5.0)])
def test_percentiles_are_interpolated(share: float, value: float) -> None:
    assert percentile([5.0, 1.0, 4.0, 2.0, 3.0], share) == pytest.approx(value)


def test_percentiles_of_one_sample_and_of_none() -> None:
    assert percentile([7.0], 0.9) == 7.0
    with pytest.raises(UsageError):
        percentile([], 0.5)


def test_a_case_pools_the_samples_of_all_rounds() -> None:
    assert case("a", [1, 2], [3, 4, 5]) == Case("a", 3.0, 1.4, 4.6, 5, ((1.0, 2.0), (3.0, 4.0, 5.0)))


def test_ratios_are_against_the_first_with_their_spread() -> None:
    first = case("echelon", [10, 10, 10], [20, 20, 20], [10, 10, 10])
    mxnet = case("mxnet", [100, 100, 100], [220, 220, 220], [120, 120, 120])
    gloo = case("gloo", [5, 5, 5], [10, 10, 10], [5, 5, 5])
    against_mxnet, against_gloo = ratios([first, mxnet, gloo])
    assert (against_mxnet.name, against_mxnet.value) == ("echelon_vs_mxnet", 12.0)
    assert against_mxnet.rounds == (10.0, 11.0, 12.0)
    assert (against_mxnet.low, against_mxnet.high) == (10.0, 12.0)
    assert (against_gloo.name, against_gloo.value) == ("echelon_vs_gloo", 0.5)
    assert ratios([first]) == []


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=50))
def test_percentiles_are_ordered_and_inside_the_values(values: list[float]) -> None:
    found = [percentile(values, share) for share in (0, 0.5, 0.9, 0.99, 1)]
    assert found == sorted(found)
    assert (found[0], found[-1]) == (min(values), max(values))
