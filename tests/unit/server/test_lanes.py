"""Keys that are pushed together are one lane until a request names only some of them."""

from __future__ import annotations

from echelon.schemes import Engine, bsp
from echelon.server.storage.lanes import Lanes


def make(num_keys: int) -> tuple[Lanes, list[tuple[int, tuple[int, ...]]]]:
    splits: list[tuple[int, tuple[int, ...]]] = []
    lanes = Lanes(Engine(bsp(), [0]), lambda keys, lane: True, lambda lane, parts: splits.append((lane, parts)))
    for key in range(num_keys):
        lanes.add(key)
    return lanes, splits


def test_a_first_push_unites_its_keys_even_after_they_were_pulled() -> None:
    lanes, _ = make(3)
    assert lanes.resolve([0, 1, 2], pushed=False) == [0, 1, 2]
    assert lanes.resolve([0, 1, 2], pushed=True) == [-1]
    assert lanes.resolve([0, 1, 2], pushed=False) == [-1]
    assert lanes.keys(-1) == (0, 1, 2)


def test_a_request_for_some_of_the_keys_splits_the_lane() -> None:
    lanes, splits = make(4)
    (lane,) = lanes.resolve([0, 1, 2, 3], pushed=True)
    (part,) = lanes.resolve([1, 2], pushed=False)
    assert lanes.keys(part) == (1, 2)
    other = lanes.lane_of(0)
    assert lanes.keys(other) == (0, 3)
    assert splits == [(lane, (part, other))]
    assert lanes.resolve([0, 1, 2, 3], pushed=True) == [other, part]


def test_a_single_key_is_a_lane_with_its_own_number() -> None:
    lanes, _ = make(2)
    assert lanes.resolve([1], pushed=True) == [1]
    assert lanes.resolve([0], pushed=True) == [0]
