"""Weak and strong scaling: speedup and efficiency of a growing number of devices or workers. Pure.

The formulas are those of DLBS: the speedup is the throughput over that of the smallest number. The efficiency is
t1 / tN in weak scaling, where the batch of each device stays, and t1 / (N tN) in strong scaling, where that of all
does. DLBS limits it to 100 %; here a larger one is shown, because it says that something else changed, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Point:
    """A measurement with `count` devices or workers: mean milliseconds per batch, and samples per second of all."""

    count: int
    time_ms: float
    samples_per_s: float


@dataclass(frozen=True, slots=True)
class Scaled:
    """A point compared with the one of the smallest count."""

    count: int
    speedup: float
    efficiency_percent: float


def scaling(points: Sequence[Point], *, weak: bool) -> list[Scaled]:
    """Return speedup and efficiency of every point, in the order given. `weak`: the batch of each device stays."""
    if not points:
        return []
    first = min(points, key=lambda point: point.count)

    def efficiency(point: Point) -> float:
        growth = 1.0 if weak else point.count / first.count
        return 100 * first.time_ms / (growth * point.time_ms)

    return [Scaled(point.count, point.samples_per_s / first.samples_per_s, efficiency(point)) for point in points]
