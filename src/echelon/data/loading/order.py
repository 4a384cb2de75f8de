"""Which samples come when, on which worker, with which random numbers: functions of (seed, epoch, sample counter).

A sample's counter is its position in the epoch's order over all workers. Nothing here depends on the number of workers,
threads or batches, on time, or on earlier random numbers. So any point of any epoch can be computed directly, which is
all that resuming needs, and workers agree on the order without communicating.

The numbers come from a 64-bit mixing function and not from NumPy's generators, because those may change between
versions. Two machines with different orders would skip some samples and repeat others. An order of 1.28 million samples
takes about 0.2 s and 10 MB once per epoch; a random number takes about 10 ns.

A sharding selects one worker's positions of the order; over all workers, every sample is used exactly once. It selects
again in each epoch, so a file sorted by class does not give a worker one class.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from echelon.errors import UsageError

Indices: TypeAlias = NDArray[np.int64]
LastBatch: TypeAlias = Literal["keep", "drop", "wrap"]

_MASK = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15
_ORDER, _DRAWS = 1, 2  # separate streams of one seed
_FRACTION_DIGITS = 9  # data_sharding files are checked to 1e-9; neighbouring shares must round to the same sample


class Sharding(Protocol):
    """Selects one worker's positions of an epoch's order; str() is the subject of a sentence about them."""

    def positions(self, num_samples: int) -> Indices:
        """Return ascending positions in an epoch of `num_samples`; over all workers, each position appears once."""


@dataclass(frozen=True, slots=True)
class ByPart:
    """Every num_parts-th position, beginning at part_index: the default.

    At each step, W workers with batches of B together use exactly the samples that one worker with batches of W x B
    would use.
    """

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
    """The positions from `start` to `end`, which are fractions of the epoch: unequal shares for unequal machines."""

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


@dataclass(frozen=True, slots=True)
class RandomPart:
    """`count` positions at random, always the same ones: a part of the data that has all classes, even if sorted."""

    count: int

    def positions(self, num_samples: int) -> Indices:
        """See Sharding."""
        if self.count >= num_samples:
            return np.arange(num_samples, dtype=np.int64)
        return np.sort(permutation(0, 0, num_samples)[: self.count])

    def __str__(self) -> str:
        return f"a random part of {self.count}"


def _border(num_samples: int, fraction: float) -> int:
    return int(num_samples * round(fraction, _FRACTION_DIGITS) + 0.5)


@dataclass(frozen=True, slots=True)
class State:
    """Where a worker is in the data: it has received `position` of its own samples of `epoch`."""

    epoch: int = 0
    position: int = 0


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The records of one batch and their sample counters. `after` is the state once the batch has been used.

    `lease`: the number of the lease that the batch belongs to, and how many of its batches are before this one.
    """

    epoch: int
    records: Indices
    counters: Indices
    after: State
    lease: tuple[int, int] | None = None


class Plans(Protocol):
    """Where a loader gets its batches from."""

    def take(self, *, wait: bool) -> BatchPlan | None:
        """Return the next batch, or None if there is none now. With `wait`, None means that the loader stops here.

        A loader waits only if its consumer has used all batches: the next ones may depend on that.
        """

    def drop_lost(self, limit: int) -> int:
        """Return how many of the last `limit` batches that were taken must not be used. The loader drops them."""


class EndlessPlans:
    """The batches of a sampling, epoch after epoch."""

    def __init__(self, batches: Iterator[BatchPlan]) -> None:
        self._batches = batches

    def take(self, *, wait: bool) -> BatchPlan | None:
        """See Plans."""
        return next(self._batches)

    def drop_lost(self, limit: int) -> int:
        """See Plans."""
        return 0


@dataclass(frozen=True, slots=True)
class Sampling:
    """The settings that determine which sample comes when.

    `last_batch` says whether a shorter last batch is kept, dropped, or filled up from the beginning of the worker's
    samples ("wrap", MXNet's round_batch). `num_batches` makes an epoch exactly that many full batches; a worker with
    too few samples repeats them, because lock-step workers need the same number of steps.
    """

    num_samples: int
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    sharding: Sharding = field(default_factory=ByPart)
    last_batch: LastBatch = "keep"
    num_batches: int | None = None

    def __post_init__(self) -> None:
        if self.num_samples < 1 or self.batch_size < 1:
            raise UsageError(f"samples and batch size must be at least 1, got {self.num_samples} and {self.batch_size}")
        if self.last_batch not in ("keep", "drop", "wrap"):
            raise UsageError(f"last_batch must be keep, drop or wrap, got {self.last_batch!r}")
        if not self.batches_per_epoch:
            raise UsageError(self._explain_no_batch())

    def _explain_no_batch(self) -> str:
        """Return why an epoch has no batch: there are no samples, or too few for a full batch."""
        have = len(self.sharding.positions(self.num_samples))
        advice = "use fewer workers"
        if isinstance(self.sharding, ByFraction):
            one = f"one sample is 1/{self.num_samples} of the data"
            advice = f"give it a larger share in the data_sharding file ({one})"
        of_them = f"{self.sharding} has {have} of {self.num_samples} samples"
        if have:
            of_them, advice = f"{of_them}, and a smaller last batch is dropped", f"{advice} or use a smaller batch size"
        return f"no batch of {self.batch_size} for this worker: {of_them}; {advice}"

    def order(self, epoch: int) -> Indices:
        """Return all samples in the order of an epoch."""
        if not self.shuffle:
            return np.arange(self.num_samples, dtype=np.int64)
        return permutation(self.seed, epoch, self.num_samples)

    def counters(self) -> Indices:
        """Return this worker's positions in every epoch's order, cut or repeated to fill its batches."""
        mine = self.sharding.positions(self.num_samples)
        if self.num_batches is not None:
            return np.resize(mine, self.num_batches * self.batch_size if len(mine) else 0)
        rest = len(mine) % self.batch_size
        if not rest or self.last_batch == "keep":
            return mine
        if self.last_batch == "drop":
            return mine[: len(mine) - rest]
        return np.resize(mine, len(mine) - rest + self.batch_size)

    @property
    def batches_per_epoch(self) -> int:
        """The number of this worker's batches, which is the same in every epoch."""
        return -(-len(self.counters()) // self.batch_size)

    def batches(self, state: State) -> Iterator[BatchPlan]:
        """Yield this worker's batches from `state` on, epoch after epoch, endlessly."""
        epoch, position = state.epoch, state.position
        counters = self.counters()
        while True:
            order = self.order(epoch)
            for start in range(position, len(counters), self.batch_size):
                part = counters[start : start + self.batch_size]
                end = start + len(part)
                after = State(epoch, end) if end < len(counters) else State(epoch + 1, 0)
                yield BatchPlan(epoch, order[part], part, after)
            epoch, position = epoch + 1, 0


def permutation(seed: int, epoch: int, num_samples: int) -> Indices:
    """Return the epoch's order of samples 0 ... num_samples-1."""
    keys = _mix(_key(seed, epoch, _ORDER) + np.arange(num_samples, dtype=np.uint64) * np.uint64(_STEP))
    return np.argsort(keys).astype(np.int64, copy=False)  # all keys are different, so every sort gives the same order


def uniforms(seed: int, epoch: int, counters: Indices, num: int) -> NDArray[np.float64]:
    """Return `num` numbers in [0, 1) for each sample counter, as rows."""
    rows = _mix(_key(seed, epoch, _DRAWS) + counters.astype(np.uint64) * np.uint64(_STEP))
    bits = _mix(rows[:, None] + np.arange(1, num + 1, dtype=np.uint64) * np.uint64(_STEP))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _key(seed: int, epoch: int, stream: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    key = np.array([seed & _MASK], np.uint64)
    for word in (epoch, stream):
        key = _mix(key + np.uint64((word + 1) * _STEP & _MASK))
    return key


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble 64-bit words one to one: the output function of the splitmix64 generator."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
