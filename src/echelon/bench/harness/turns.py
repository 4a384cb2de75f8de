"""Contenders that take turns, and the statistics of their steps.

The speed of a machine drifts (clock frequency, other load, page cache). If contenders ran one after another, their
ratio would drift too; if they take turns, it does not. Therefore all contenders are started first, and each blocks
while another one runs. The order rotates from round to round, so that no contender always runs after the same one. This
module owns the turns and the statistics. Processes are in `process`, tables and files in `results`.
"""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from echelon.errors import UsageError

Rounds = list[list[float]]
"""The seconds of each step: one list per round."""


class Contender(ABC):
    """A job that does steps when it is its turn. As a context manager it starts on entry and stops on exit."""

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def start(self) -> None:
        """Start everything that the first step needs; then idle."""

    @abstractmethod
    def run_round(self, num_steps: int) -> list[float]:
        """Do `num_steps` steps and return the seconds of each; then idle again."""

    @abstractmethod
    def stop(self) -> None:
        """End every process that was started. Does nothing if none was."""

    def abort(self) -> None:
        """Stop after a failure; processes need not exit cleanly."""
        self.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.stop()
        else:
            self.abort()


@dataclass(frozen=True, slots=True)
class Case:
    """One contender's figures. `rounds` holds every sample in milliseconds, in the order of measurement."""

    name: str
    median_ms: float
    p10_ms: float
    p90_ms: float
    samples: int
    rounds: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times faster the first contender is than another: the ratio of their medians, overall and by round."""

    name: str
    value: float
    rounds: tuple[float, ...]

    @property
    def low(self) -> float:
        """The ratio of the round in which the first contender did worst."""
        return min(self.rounds)

    @property
    def high(self) -> float:
        """The ratio of the round in which the first contender did best."""
        return max(self.rounds)


def measure(contenders: Sequence[Contender], rounds: int, steps: int, warmup: int) -> list[Case]:
    """Start all contenders, run them in turns, stop them, and return each one's figures."""
    with ExitStack() as started:
        for contender in contenders:
            started.enter_context(contender)
        taken = alternate(contenders, rounds, steps, warmup)
    return summarise(taken)


def alternate(contenders: Sequence[Contender], rounds: int, steps: int, warmup: int) -> dict[str, Rounds]:
    """Run started contenders in turns and return their times. Each turn begins with `warmup` untimed steps."""
    names = [contender.name for contender in contenders]
    if len(set(names)) < len(names):
        raise UsageError(f"contenders must have different names, not {', '.join(names)}")
    if rounds < 1 or steps < 1 or warmup < 0:
        raise UsageError(f"needs rounds ≥ 1, steps ≥ 1, warmup ≥ 0; got {rounds}, {steps}, {warmup}")
    taken: dict[str, Rounds] = {name: [] for name in names}
    with _progress() as progress:
        bars = {name: progress.add_task(name, total=rounds, state="") for name in names}
        for index in range(rounds):
            for contender in turn_order(contenders, index):
                _take_turn(contender, steps, warmup, taken[contender.name], progress, bars[contender.name])
    return taken


def turn_order(contenders: Sequence[Contender], round_index: int) -> list[Contender]:
    """Return the order of a round. It starts one contender later each round."""
    first = round_index % len(contenders) if contenders else 0
    return [*contenders[first:], *contenders[:first]]


def _take_turn(contender: Contender, steps: int, warmup: int, taken: Rounds, progress: Progress, bar: TaskID) -> None:
    progress.update(bar, state="running")
    taken.append(contender.run_round(warmup + steps)[warmup:])
    last_ms = statistics.median(taken[-1]) * 1e3
    progress.update(bar, advance=1, state=f"{last_ms:.2f} ms")


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description:<10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rounds"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[state]}"),
        console=Console(stderr=True),
    )


def summarise(taken: dict[str, Rounds]) -> list[Case]:
    """Return the figures of each contender over all its rounds."""
    return [_case(name, rounds) for name, rounds in taken.items()]


def _case(name: str, rounds: Rounds) -> Case:
    in_ms = tuple(tuple(round(seconds * 1e3, 6) for seconds in one) for one in rounds)
    samples = [value for one in in_ms for value in one]
    p10, median, p90 = (percentile(samples, share) for share in (0.1, 0.5, 0.9))
    return Case(name, round(median, 6), round(p10, 6), round(p90, 6), len(samples), in_ms)


def percentile(samples: Sequence[float], share: float) -> float:
    """Return the value below which `share` of the samples lie, interpolated linearly between neighbours."""
    if not samples:
        raise UsageError("cannot compute a percentile of no samples")
    ordered = sorted(samples)
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def ratios(cases: Sequence[Case]) -> list[Ratio]:
    """Compare the first case with each other one; a ratio above 1 means that the first is faster."""
    return [_ratio(cases[0], other) for other in cases[1:]]


def _ratio(first: Case, other: Case) -> Ratio:
    by_round = [
        statistics.median(theirs) / statistics.median(ours)
        for ours, theirs in zip(first.rounds, other.rounds, strict=True)
    ]
    return Ratio(
        f"{first.name}_vs_{other.name}",
        round(other.median_ms / first.median_ms, 4),
        tuple(round(value, 4) for value in by_round),
    )
