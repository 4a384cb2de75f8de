"""Contenders that take turns, and the statistics of their steps.

Figures taken one after the other drift with the machine (frequency, neighbours, page cache); figures taken in turn
drift together, so their ratio stays. That is why every contender is started first and then idles, blocked, while
another runs, and why the order rotates: nobody always runs after the same neighbour. This module owns the turns and the
arithmetic; it knows nothing of processes (`process`) or of files and tables (`results`).
"""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from echelon.errors import UsageError

Rounds = list[list[float]]
"""Seconds of each step, a list for each round."""


class Contender(ABC):
    """Something that can do steps when it is its turn. Used in a `with` block: started on entry, stopped on exit."""

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def start(self) -> None:
        """Get to the point where a first step could be done; then idle."""

    @abstractmethod
    def run_round(self, num_steps: int) -> list[float]:
        """Do that many steps and return the seconds each took; then idle again."""

    @abstractmethod
    def stop(self) -> None:
        """Leave nothing running. Harmless when nothing was started."""

    def abort(self) -> None:
        """`stop` when something already failed: need not be gentle."""
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
    """One contender's figures. `rounds` has every sample, in milliseconds, as they were taken."""

    name: str
    median_ms: float
    p10_ms: float
    p90_ms: float
    samples: int
    rounds: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times faster the first contender is than another: their medians divided, and the same round by round."""

    name: str
    value: float
    rounds: tuple[float, ...]

    @property
    def low(self) -> float:
        """The round in which the first contender did worst."""
        return min(self.rounds)

    @property
    def high(self) -> float:
        """The round in which the first contender did best."""
        return max(self.rounds)


def alternate(
    contenders: Sequence[Contender], rounds: int, steps: int, warmup: int, console: Console | None = None
) -> dict[str, Rounds]:
    """Run started contenders in turn. Each turn begins with `warmup` steps that are not counted."""
    names = [contender.name for contender in contenders]
    if len(set(names)) < len(names):
        raise UsageError(f"contenders must have different names, not {', '.join(names)}")
    if rounds < 1 or steps < 1 or warmup < 0:
        raise UsageError(f"needs rounds ≥ 1, steps ≥ 1, warmup ≥ 0; got {rounds}, {steps}, {warmup}")
    taken: dict[str, Rounds] = {name: [] for name in names}
    with _progress(console) as progress:
        bars = {name: progress.add_task(name, total=rounds, state="") for name in names}
        for index in range(rounds):
            for contender in turn_order(contenders, index):
                _take_turn(contender, steps, warmup, taken[contender.name], progress, bars[contender.name])
    return taken


def turn_order(contenders: Sequence[Contender], round_index: int) -> list[Contender]:
    """Who runs after whom in a round: the first one moves by one place each time."""
    first = round_index % len(contenders) if contenders else 0
    return [*contenders[first:], *contenders[:first]]


def _take_turn(contender: Contender, steps: int, warmup: int, taken: Rounds, progress: Progress, bar: TaskID) -> None:
    progress.update(bar, state="running")
    taken.append(contender.run_round(warmup + steps)[warmup:])
    last_ms = statistics.median(taken[-1]) * 1e3
    progress.update(bar, advance=1, state=f"{last_ms:.2f} ms")


def _progress(console: Console | None) -> Progress:
    return Progress(
        TextColumn("{task.description:<10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rounds"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[state]}"),
        console=console or Console(stderr=True),
    )


def summarise(taken: dict[str, Rounds]) -> list[Case]:
    """The figures of each contender over all its rounds."""
    return [_case(name, rounds) for name, rounds in taken.items()]


def _case(name: str, rounds: Rounds) -> Case:
    in_ms = tuple(tuple(round(seconds * 1e3, 6) for seconds in one) for one in rounds)
    samples = [value for one in in_ms for value in one]
    p10, median, p90 = (percentile(samples, share) for share in (0.1, 0.5, 0.9))
    return Case(name, round(median, 6), round(p10, 6), round(p90, 6), len(samples), in_ms)


def percentile(samples: Sequence[float], share: float) -> float:
    """The value below which that share of the samples lies, on the straight line between its two neighbours."""
    if not samples:
        raise UsageError("there is no percentile of no samples")
    ordered = sorted(samples)
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def ratios(cases: Sequence[Case]) -> list[Ratio]:
    """The first case against each other one; above 1 the first is faster."""
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
