"""Buckets: every parameter once, in order, none too full."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from echelon import models
from echelon.train.trainer.buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES, Bucket, make_buckets
from echelon.train.trainer.regions import region_of, regions_of

SIZES = st.lists(st.integers(0, 100), max_size=40)


@pytest.mark.parametrize(
    ("sizes", "members"),
    [
        ([], []),
        ([3], [(0,)]),
        ([3, 3, 3, 3], [(0,), (1, 2, 3)]),  # the first one is small
        ([2, 2, 5, 5, 5], [(0, 1), (2, 3), (4,)]),
        ([1, 11, 1, 1], [(0,), (1,), (2, 3)]),  # one that is too big is a bucket by itself
        ([50, 50], [(0,), (1,)]),
        ([4, 10, 0, 1], [(0,), (1, 2), (3,)]),
    ],
)
def test_buckets_of_ten_the_first_of_four(sizes: list[int], members: list[tuple[int, ...]]) -> None:
    assert make_buckets(sizes, limit=10, first=4) == [Bucket(index, part) for index, part in enumerate(members)]


@settings(deadline=None)
@given(SIZES, st.integers(1, 60), st.integers(1, 60))
def test_everything_once_in_order_and_no_fuller_than_allowed(sizes: list[int], limit: int, first: int) -> None:
    buckets = make_buckets(sizes, limit, first)
    assert [member for bucket in buckets for member in bucket.members] == list(range(len(sizes)))
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
    for bucket in buckets:
        room = min(first, limit) if bucket.index == 0 else limit
        filled = [sizes[member] for member in bucket.members]
        assert filled
        assert sum(filled) <= room or len(filled) == 1
    for one, other in pairwise(buckets):  # none is closed while the next parameter fits
        room = min(first, limit) if one.index == 0 else limit
        assert sum(sizes[member] for member in one.members) + sizes[other.members[0]] > room


def test_the_usual_sizes() -> None:
    assert FIRST_BUCKET_BYTES < BUCKET_BYTES
    quarter = BUCKET_BYTES // 4
    assert [len(bucket.members) for bucket in make_buckets([quarter] * 9)] == [1, 4, 4]


def test_a_bucket_has_one_part_of_the_network_only() -> None:
    buckets = make_buckets([2, 2, 2, 2, 9, 2], limit=10, first=10, parts=[3, 3, 2, 2, 2, 1])
    assert [bucket.members for bucket in buckets] == [(0, 1), (2, 3), (4,), (5,)]


def test_buckets_on_a_gpu_end_where_regions_do() -> None:
    model = models.build("resnet", num_classes=10, image_shape=(3, 28, 28), num_layers=50)
    names = [name for name, _ in model.named_parameters()]
    parts = region_of(model)
    assert list(parts) == names
    assert sorted(set(parts.values())) == list(range(len(regions_of(model))))
    buckets = make_buckets([4] * len(names), 10_000, 10_000, [parts[name] for name in reversed(names)])
    assert len(buckets) == len(regions_of(model))


def test_a_parameter_that_is_used_twice_is_ready_with_its_first_use() -> None:
    same, one, other = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    other.weight = one.weight
    model = nn.Sequential(same, one, nn.Sequential(same, nn.Tanh()), other, same, nn.Linear(4, 2))
    prefixes = [[prefix for prefix, _ in region] for region in regions_of(model)]
    assert prefixes == [["0."], ["1."], ["2.0.", "2.1.", "3.", "4."], ["5."]], "what comes again fills no region"
    assert region_of(model) == {
        **dict.fromkeys(["0.weight", "0.bias"], 0),
        **dict.fromkeys(["1.weight", "1.bias"], 1),
        "3.bias": 2,
        **dict.fromkeys(["5.weight", "5.bias"], 3),
    }
