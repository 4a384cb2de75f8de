"""The axis of a ledger: all epochs one after the other.

Position p of epoch e is the point e * num_samples + p. On this axis the positions of two epochs that overlap are one
set. Messages and checkpoints count from the start of an epoch; positions after its end are those of the next epoch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from echelon.cluster.ledger.intervals import Interval


@dataclass(frozen=True, slots=True)
class Axis:
    """Converts positions of epochs of `num_samples` samples to points of the axis, and back."""

    num_samples: int

    def epoch_of(self, point: int) -> int:
        """Return the epoch of a point."""
        return point // self.num_samples

    def epochs(self, first: int, stop: int) -> Interval:
        """Return the points of the epochs from `first` to before `stop`."""
        return first * self.num_samples, stop * self.num_samples

    def points(self, epoch: int, positions: Iterable[Interval]) -> list[Interval]:
        """Return positions that count from the start of an epoch as points. Empty batches of lock-step stay (0, 0)."""
        base = epoch * self.num_samples
        return [(base + start, base + stop) if start < stop else (0, 0) for start, stop in positions]

    def positions(self, epoch: int, points: Iterable[Interval]) -> list[Interval]:
        """Return points as positions that count from the start of an epoch."""
        return self.points(-epoch, points)

    def after(self, epochs: int, positions: Iterable[Interval]) -> list[Interval]:
        """Return positions that count from the start of an epoch as those from `epochs` epochs later; none before."""
        later = self.positions(epochs, positions)
        return [(max(0, start), stop) for start, stop in later if stop > 0]
