"""Sets of positions as intervals, compared with Python's sets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from echelon.cluster.ledger.intervals import IntervalSet

intervals = st.tuples(st.integers(0, 20), st.integers(0, 20))
changes = st.lists(st.tuples(st.sampled_from(["add", "remove"]), intervals), max_size=12)


def positions(found: IntervalSet) -> set[int]:
    return {position for start, stop in found for position in range(start, stop)}


def changed(steps: list[tuple[str, tuple[int, int]]]) -> tuple[IntervalSet, set[int]]:
    found, expected = IntervalSet(), set[int]()
    for step, (start, stop) in steps:
        if step == "add":
            found.add(start, stop)
            expected |= set(range(start, stop))
        else:
            found.remove(start, stop)
            expected -= set(range(start, stop))
    return found, expected


@given(changes)
def test_added_and_removed_positions_are_those_of_a_set(steps: list[tuple[str, tuple[int, int]]]) -> None:
    found, expected = changed(steps)
    assert positions(found) == expected
    assert len(found) == len(expected)
    assert bool(found) == bool(expected)
    ends = [end for interval in found for end in interval]
    assert ends == sorted(set(ends)), "intervals that touch are one"


@given(changes, changes, intervals)
def test_questions_have_the_answers_of_a_set(
    steps: list[tuple[str, tuple[int, int]]], others: list[tuple[str, tuple[int, int]]], asked: tuple[int, int]
) -> None:
    (found, expected), (other, others_expected) = changed(steps), changed(others)
    assert found.covers(*asked) == expected.issuperset(range(*asked))
    assert found.meets(*asked) == (not expected.isdisjoint(range(*asked)))
    assert positions(found.without(other)) == expected - others_expected
    assert positions(found.within(other)) == expected & others_expected


@given(changes, st.integers(0, 6))
def test_the_first_positions_are_adjacent_and_limited(steps: list[tuple[str, tuple[int, int]]], limit: int) -> None:
    found, expected = changed(steps)
    start, stop = found.take_first(limit)
    taken = set(range(start, stop))
    assert len(taken) <= limit
    assert taken <= expected
    assert positions(found) == expected - taken
    if expected and limit:
        assert start == min(expected)
        assert len(taken) == limit or stop not in expected
