"""A curve over time, or over epochs, with a limited number of points, however long the run."""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_POINTS = 240
FIRST_WIDTH_S = 0.25


@dataclass(slots=True)
class _Bin:
    """Sums over samples."""

    samples: int = 0
    seconds: float = 0.0
    loss: float = 0.0
    accuracy: float = 0.0

    def add(self, other: _Bin) -> None:
        self.samples += other.samples
        self.seconds += other.seconds
        self.loss += other.loss
        self.accuracy += other.accuracy


class TimeCurve:
    """Loss and accuracy over time: means over bins of time, which double in width when there are too many."""

    def __init__(self) -> None:
        self._width_s = FIRST_WIDTH_S
        self._bins: dict[int, _Bin] = {}

    def add(self, seconds: float, samples: int, loss: float, accuracy: float) -> None:
        """Add the mean loss and accuracy of some samples."""
        added = _Bin(samples, samples * seconds, samples * loss, samples * accuracy)
        self._bins.setdefault(math.floor(seconds / self._width_s), _Bin()).add(added)
        while len(self._bins) > MAX_POINTS:
            self._halve()

    def points(self, x: str = "seconds") -> list[dict[str, float]]:
        """Return the points in the order of time, which is called `x`: "epoch" if epochs were added."""
        return [
            {
                x: round(one.seconds / one.samples, 3),
                "loss": one.loss / one.samples,
                "accuracy": one.accuracy / one.samples,
            }
            for _, one in sorted(self._bins.items())
        ]

    def _halve(self) -> None:
        self._width_s *= 2
        before, self._bins = self._bins, {}
        for index, one in before.items():
            self._bins.setdefault(index // 2, _Bin()).add(one)
