"""Stragglers on demand: steps that last as long as if an accelerator, a slow one or one that stalls, computed them."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

from echelon.errors import UsageError

LARGEST_FACTOR = 1_000_000  # a longer wait is an error of the system's clock, not a slow worker


@dataclass(frozen=True, slots=True)
class Pace:
    """`seconds` a step at least; `slow` multiplies one rank's, `stall` any step's with a probability, by a seed."""

    seconds: float = 0.0
    slow: dict[int, float] = field(default_factory=dict)
    stall: tuple[float, float] | None = None
    seed: int = 0

    def step_s(self, rank: int, clock: int) -> float:
        """How long a step must last: a function of the seed, so that schemes meet the same stalls."""
        factor = self.slow.get(rank, 1.0)
        if self.stall is not None:
            probability, stalled = self.stall
            if random.Random(f"{self.seed}/{rank}/{clock}").random() < probability:
                factor *= stalled
        return self.seconds * factor


class Pacer:
    """Holds one worker's steps to its pace. The wait comes before backward: gradients leave during it."""

    def __init__(self, pace: Pace, rank: int) -> None:
        self._pace = pace
        self._rank = rank
        self._began = 0.0
        self._held = 0.0
        self._backward_s = 0.0

    def begin(self) -> None:
        """A step begins: its weights are there."""
        self._began = time.perf_counter()

    def hold(self, clock: int) -> None:
        """Before backward: wait until only backward's own time is left of the step."""
        left = self._began + self._pace.step_s(self._rank, clock) - self._backward_s - time.perf_counter()
        if left > 0:
            time.sleep(left)
        self._held = time.perf_counter()

    def end(self) -> None:
        """After backward: remember how long it took."""
        self._backward_s = 0.8 * self._backward_s + 0.2 * (time.perf_counter() - self._held)


def parse_slow(text: str) -> dict[int, float]:
    """`RANK:FACTOR`, or several separated by commas."""
    found: dict[int, float] = {}
    for part in text.split(","):
        rank, factor = _pair(part, "--slow", "RANK:FACTOR, for example 3:3")
        if not rank.is_integer() or rank < 0 or int(rank) in found:
            raise UsageError(f"--slow {text}: a rank is a whole number, named once; {rank:g} is not")
        found[int(rank)] = factor
    return found


def parse_stall(text: str) -> tuple[float, float]:
    """`PROBABILITY:FACTOR`."""
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
        raise UsageError(f"{flag} {text}: the factor must be 1 or more, and at most {LARGEST_FACTOR:,}")
    return first, second
