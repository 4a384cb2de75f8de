"""Which samples of an epoch belong to one worker. Over all workers, every sample is used exactly once.

An epoch is one order of all samples, the same on every worker (`order`); a sharding selects positions in it.

- `ByPart`: every num_parts-th position. At each step, W workers with batches of B together use exactly the samples that
  one worker with batches of W x B would use. This is the default.
- `ByFraction`: a contiguous range of the order, from `data_sharding`: unequal shares for unequal machines.

Both distribute the samples again in each epoch, so a file sorted by class does not give a worker one class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from echelon.errors import UsageError

Indices: TypeAlias = NDArray[np.int64]

_FRACTION_DIGITS = 9  # data_sharding files are checked to 1e-9; neighbouring shares must round to the same sample


class Sharding(Protocol):
    """Selects one worker's positions of an epoch's order; str() is the subject of a sentence about them."""

    def positions(self, num_samples: int) -> Indices:
        """Return ascending positions in an epoch of `num_samples`; over all workers, each position appears once."""


@dataclass(frozen=True, slots=True)
class ByPart:
    """Every num_parts-th position, beginning at part_index."""

    part_index: int = 0
    num_parts: int = 1

    def __post_init__(self) -> None:
        if self.num_parts < 1 or not 0 <= self.part_index < self.num_parts:
            raise UsageError(f"part_index must be in 0 ... num_parts-1, got part {self.part_index} of {self.num_parts}")

    def positions(self, num_samples: int) -> Indices:
        """See Sharding."""
        return np.arange(self.part_index, num_samples, self.num_parts, dtype=np.int64)

    def __str__(self) -> str:
        return f"part {self.part_index} of 0 ... {self.num_parts - 1}" if self.num_parts > 1 else "it"


@dataclass(frozen=True, slots=True)
class ByFraction:
    """The positions from `start` to `end`, which are fractions of the epoch."""

    start: float
    end: float

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end <= 1:
            raise UsageError(f"a share must satisfy 0 <= start < end <= 1, got {self.start:g} {self.end:g}")

    def positions(self, num_samples: int) -> Indices:
        """See Sharding."""
        return np.arange(_border(num_samples, self.start), _border(num_samples, self.end), dtype=np.int64)

    def __str__(self) -> str:
        return f"its share {self.start:g} ... {self.end:g}"


def _border(num_samples: int, fraction: float) -> int:
    return int(num_samples * round(fraction, _FRACTION_DIGITS) + 0.5)
