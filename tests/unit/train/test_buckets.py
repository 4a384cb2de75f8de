"""Buckets: every parameter once, in order, none too full."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.train.buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES, Bucket, make_buckets

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
