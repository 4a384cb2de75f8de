"""How parameters are divided into buckets: each one once, in order, and no bucket above its limit."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from echelon import models
from echelon.train.trainer.buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES, make_buckets
from echelon.train.trainer.regions import region_of, regions_of

SIZES = st.lists(st.integers(0, 100), max_size=40)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([3], [[0]]),
        ([3, 3, 3, 3], [[0], [1, 2, 3]]),  # the first bucket is small
        ([2, 2, 5, 5, 5], [[0, 1], [2, 3], [4]]),
        ([1, 11, 1, 1], [[0], [1], [2, 3]]),  # a parameter above the limit is a bucket by itself
        ([50, 50], [[0], [1]]),
        ([4, 10, 0, 1], [[0], [1, 2], [3]]),
    ],
)
def test_buckets_with_a_limit_of_ten_and_of_four_for_the_first(sizes: list[int], expected: list[list[int]]) -> None:
    assert make_buckets(sizes, limit=10, first=4) == expected


@settings(deadline=None)
@given(SIZES, st.integers(1, 60), st.integers(1, 60))
def test_each_parameter_once_in_order_and_buckets_within_the_limit(sizes: list[int], limit: int, first: int) -> None:
    buckets = make_buckets(sizes, limit, first)
    assert [member for bucket in buckets for member in bucket] == list(range(len(sizes)))
    rooms = [min(first, limit), *[limit] * len(buckets)]
    for bucket, room in zip(buckets, rooms, strict=False):
        filled = [sizes[member] for member in bucket]
        assert filled
        assert sum(filled) <= room or len(filled) == 1
    for (one, other), room in zip(pairwise(buckets), rooms, strict=False):  # none is closed while the next one fits
        assert sum(sizes[member] for member in one) + sizes[other[0]] > room


def test_default_sizes() -> None:
    assert FIRST_BUCKET_BYTES < BUCKET_BYTES
    quarter = BUCKET_BYTES // 4
    assert [len(bucket) for bucket in make_buckets([quarter] * 9)] == [1, 4, 4]


def test_a_bucket_does_not_cross_parts_of_the_network() -> None:
    buckets = make_buckets([2, 2, 2, 2, 9, 2], limit=10, first=10, parts=[3, 3, 2, 2, 2, 1])
    assert buckets == [[0, 1], [2, 3], [4], [5]]


def test_buckets_on_a_gpu_end_at_the_borders_of_regions() -> None:
    model = models.build("resnet", num_classes=10, image_shape=(3, 28, 28), num_layers=50)
    names = [name for name, _ in model.named_parameters()]
    parts = region_of(model)
    assert list(parts) == names
    assert sorted(set(parts.values())) == list(range(len(regions_of(model))))
    buckets = make_buckets([4] * len(names), 10_000, 10_000, [parts[name] for name in reversed(names)])
    assert len(buckets) == len(regions_of(model))


def test_a_parameter_used_twice_belongs_to_the_region_of_its_first_use() -> None:
    same, one, other = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    other.weight = one.weight
    model = nn.Sequential(same, one, nn.Sequential(same, nn.Tanh()), other, same, nn.Linear(4, 2))
    prefixes = [[prefix for prefix, _ in region] for region in regions_of(model)]
    assert prefixes == [["0."], ["1."], ["2.0.", "2.1.", "3.", "4."], ["5."]], "a repeated module does not count again"
    assert region_of(model) == {
        **dict.fromkeys(["0.weight", "0.bias"], 0),
        **dict.fromkeys(["1.weight", "1.bias"], 1),
        "3.bias": 2,
        **dict.fromkeys(["5.weight", "5.bias"], 3),
    }
