"""Buckets: neighbouring keys that are pushed together, in the order in which backward finishes them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BUCKET_BYTES = 4 << 20
FIRST_BUCKET_BYTES = 1 << 20  # a small first one, so that the wire is busy soon after backward begins


_GPU_BUCKETS = 8
_SMALLEST_BYTES = 256 << 10


def limit_on_gpu(total_bytes: int) -> int:
    """Backward takes milliseconds there: a small network needs small buckets for any to leave before it is over."""
    return min(BUCKET_BYTES, max(_SMALLEST_BYTES, total_bytes // _GPU_BUCKETS))


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters by index, pushed as one message a server."""

    index: int
    members: tuple[int, ...]


def make_buckets(
    sizes_bytes: Sequence[int],
    limit: int = BUCKET_BYTES,
    first: int = FIRST_BUCKET_BYTES,
    parts: Sequence[int] | None = None,
) -> list[Bucket]:
    """Cut parameters (in push order) into buckets of about `limit` bytes; a bigger parameter is a bucket by itself.

    `parts`: the part of the network each is in. Gradients of a part come at one time, so a bucket has one part only:
    the last one to leave, which everybody waits for, then has no gradient that could have left before.
    """
    buckets: list[Bucket] = []
    members: list[int] = []
    filled = 0
    for index, size in enumerate(sizes_bytes):
        room = limit if buckets else min(first, limit)
        begins = parts is not None and index > 0 and parts[index] != parts[index - 1]
        if members and (begins or filled + size > room):
            buckets.append(Bucket(len(buckets), tuple(members)))
            members, filled = [], 0
        members.append(index)
        filled += size
    if members:
        buckets.append(Bucket(len(buckets), tuple(members)))
    return buckets
