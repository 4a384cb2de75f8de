"""Artificial stragglers: steps that last as long as on a slow or stalling accelerator."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

from echelon.errors import UsageError

LARGEST_FACTOR = 1_000_000  # time.sleep fails for much longer waits


@dataclass(frozen=True, slots=True)
class Pace:
    """The minimum seconds per step; `slow` multiplies them for some ranks, `stall` for random steps."""

    seconds: float = 0.0
    slow: dict[int, float] = field(default_factory=dict)
    stall: tuple[float, float] | None = None
    seed: int = 0

    def step_s(self, rank: int, clock: int) -> float:
        """Return how long a step must last. It depends only on the seed, so all schemes have the same stalls."""
        factor = self.slow.get(rank, 1.0)
        if self.stall is not None:
            probability, stalled = self.stall
            if random.Random(f"{self.seed}/{rank}/{clock}").random() < probability:
                factor *= stalled
        return self.seconds * factor


class Pacer:
    """Slows one worker down to its pace. It waits before the backward pass, which already sends gradients."""

    def __init__(self, pace: Pace, rank: int) -> None:
        self._pace = pace
        self._rank = rank
        self._start_s = 0.0
        self._backward_start_s = 0.0
        self._backward_s = 0.0

    def begin(self) -> None:
        """Start a step; its weights have arrived."""
        self._start_s = time.perf_counter()

    def hold(self, clock: int) -> None:
        """Wait, before the backward pass, until only the duration of the backward pass is left of the step."""
        left = self._start_s + self._pace.step_s(self._rank, clock) - self._backward_s - time.perf_counter()
        if left > 0:
            time.sleep(left)
        self._backward_start_s = time.perf_counter()

    def end(self) -> None:
        """Update the estimate of the backward pass, after it."""
        self._backward_s = 0.8 * self._backward_s + 0.2 * (time.perf_counter() - self._backward_start_s)


def parse_slow(text: str) -> dict[int, float]:
    """Parse `RANK:FACTOR`, or several separated by commas."""
    found: dict[int, float] = {}
    for part in text.split(","):
        rank, factor = _pair(part, "--slow", "RANK:FACTOR, for example 3:3")
        if not rank.is_integer() or rank < 0 or int(rank) in found:
            raise UsageError(f"--slow {text}: a rank must be a whole number and given once, not {rank:g}")
        found[int(rank)] = factor
    return found


def parse_stall(text: str) -> tuple[float, float]:
    """Parse `PROBABILITY:FACTOR`."""
    probability, factor = _pair(text, "--stall", "PROBABILITY:FACTOR, for example 0.1:5")
    if not 0 <= probability <= 1:
        raise UsageError(f"--stall {text}: the probability must be between 0 and 1")
    return probability, factor


def _pair(text: str, flag: str, form: str) -> tuple[float, float]:
    try:
        first, second = (float(word) for word in text.split(":"))
    except ValueError:
        raise UsageError(f"{flag} {text!r} is not {form}") from None
    if not 1 <= second <= LARGEST_FACTOR:
        raise UsageError(f"{flag} {text}: the factor must be between 1 and {LARGEST_FACTOR:,}")
    return first, second
