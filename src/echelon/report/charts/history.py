"""The values of a run over time, of a size that does not grow with the run.

A worker's reports contain counts since its beginning. Of each interval of time the last report is kept; if there are
too many intervals, they double in length. A rate is the difference between two reports that are kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from echelon.report.state.time_curve import TimeCurve

PHASES = ("compute", "push", "wait", "pull", "other")  # of a worker's time; each is a field of its reports: compute_s …
MAX_REPORTS = 240  # per worker
FIRST_WIDTH_S = 0.25
MAX_WINDOWS = 8
FIRST_WINDOW_S = 1.0
MAX_STEPS = 48  # per worker and window

Event = dict[str, Any]


class Report(NamedTuple):
    """What a worker had done at a time. `life`: how often it had joined again, which sets the counts to 0."""

    at: float
    samples: int
    phases: tuple[float, ...]  # seconds of PHASES
    life: int


class Span(NamedTuple):
    """What a worker did between two reports."""

    begin: float
    end: float
    samples: float
    phases: tuple[float, ...]


class StepTime(NamedTuple):
    """One step: its end and the seconds of its first four phases."""

    end: float
    phases: tuple[float, float, float, float]

    @property
    def begin(self) -> float:
        """When the step began."""
        return self.end - sum(self.phases)


@dataclass(slots=True)
class WorkerHistory:
    """The reports of one worker, at most MAX_REPORTS of them and one per life more."""

    life: int = -1
    finished: bool = False
    latest: Report | None = None
    traffic: dict[str, int] = field(default_factory=dict)  # bytes over all lives
    _traffic_before: dict[str, int] = field(default_factory=dict)  # of the lives that have ended
    _width_s: float = FIRST_WIDTH_S
    _kept: dict[tuple[int, int], Report] = field(default_factory=dict)  # by life and interval
    _firsts: list[Report] = field(default_factory=list)

    def begin(self, at: float) -> None:
        """Start to count at 0: the worker begins, or joins again."""
        self.life += 1
        self.finished = False
        self._traffic_before = dict(self.traffic)
        self.latest = Report(at, 0, (0.0,) * len(PHASES), self.life)
        self._firsts.append(self.latest)

    def add(self, event: Event) -> None:
        """Take a report."""
        samples = int(event["samples"])
        if self.latest is None or samples < self.latest.samples:  # a program that writes no `begin` has joined again
            self.begin(event["at"])
        since = self._firsts[-1].at
        report = Report(event["at"], samples, _phases(event, event["at"] - since), self.life)
        self.latest = report
        self.finished = event["event"] == "done"
        self._kept[self.life, math.floor(report.at / self._width_s)] = report
        for name, value in event.get("bytes", {}).items():
            self.traffic[name] = self._traffic_before.get(name, 0) + value
        while len(self._kept) > MAX_REPORTS + self.life:
            self._width_s *= 2
            kept, self._kept = self._kept, {}
            for one in kept.values():
                self._kept[one.life, math.floor(one.at / self._width_s)] = one

    def spans(self) -> list[Span]:
        """Return what the worker did between neighbouring reports of one life.

        A worker that has finished waits for the end of the others: what follows its last step is left out.
        """
        reports = sorted([*self._firsts, *self._kept.values()])
        spans = [
            Span(
                one.at,
                two.at,
                two.samples - one.samples,
                tuple(max(0.0, later - earlier) for earlier, later in zip(one.phases, two.phases, strict=True)),
            )
            for one, two in pairwise(reports)
            if one.life == two.life and two.at > one.at
        ]
        while self.finished and spans and not spans[-1].samples:
            spans.pop()
        return spans


def _phases(event: Event, elapsed: float) -> tuple[float, ...]:
    """Return the seconds of PHASES. Reports of older versions have only the wait: the rest counts as computing."""
    if "compute_s" not in event:
        return (max(0.0, elapsed - event["wait_s"]), 0.0, event["wait_s"], 0.0, 0.0)
    return tuple(float(event.get(f"{phase}_s") or 0.0) for phase in PHASES)


class StepWindows:
    """The first steps of every worker in a few short stretches of time, spread over the run."""

    def __init__(self) -> None:
        self._width_s = FIRST_WINDOW_S
        self._windows: dict[int, dict[int, list[StepTime]]] = {}  # by number, then by worker

    def add(self, rank: int, steps: Sequence[Sequence[float]]) -> None:
        """Take the steps of a report: end, and seconds of computing, pushing, waiting and pulling."""
        for end, compute, push, wait, pull in steps:
            step = StepTime(end, (compute, push, wait, pull))
            if not step.end > step.begin:  # a step without time, or one with a value that is not a number
                continue
            of_worker = self._windows.setdefault(math.floor(step.begin / self._width_s), {}).setdefault(rank, [])
            if len(of_worker) < MAX_STEPS:
                of_worker.append(step)
        while len(self._windows) > MAX_WINDOWS:
            self._width_s *= 2
            # The first half of a window keeps its steps; those of the second half are dropped.
            self._windows = {n // 2: steps for n, steps in sorted(self._windows.items(), reverse=True)}

    def best(self) -> dict[int, list[StepTime]]:
        """Return the steps of the window that has most workers; of those, of the one nearest to the middle."""
        if not self._windows:
            return {}
        middle = (min(self._windows) + max(self._windows)) / 2
        return self._windows[max(self._windows, key=lambda n: (len(self._windows[n]), -abs(n - middle)))]


class Bins:
    """What a worker did in equal bins of time. `seconds`: how much of the bin its reports cover."""

    def __init__(self, spans: Sequence[Span], begin: float, end: float, count: int) -> None:
        self.width = max(1e-9, (end - begin) / count)
        self.seconds = [0.0] * count
        self.samples = [0.0] * count
        self.phases = [[0.0] * len(PHASES) for _ in range(count)]
        for span in spans:
            first = max(0, math.floor((span.begin - begin) / self.width))
            last = min(count - 1, math.floor((span.end - begin) / self.width))
            for index in range(first, last + 1):
                low = begin + index * self.width
                self._add(index, span, min(span.end, low + self.width) - max(span.begin, low))

    def _add(self, index: int, span: Span, overlap: float) -> None:
        share = max(0.0, overlap) / (span.end - span.begin)
        self.seconds[index] += max(0.0, overlap)
        self.samples[index] += share * span.samples
        for phase, seconds in enumerate(span.phases):
            self.phases[index][phase] += share * seconds

    def rate(self, index: int) -> float:
        """Return the samples per second; NaN where less than a third of the bin is known."""
        return self.samples[index] / self.seconds[index] if self.seconds[index] > self.width / 3 else math.nan


@dataclass(slots=True)
class History:
    """The values of a run over time."""

    workers: dict[int, WorkerHistory] = field(default_factory=dict)
    steps: StepWindows = field(default_factory=StepWindows)
    training_by_epoch: TimeCurve = field(default_factory=TimeCurve)
    has_phases: bool = False  # whether workers report all phases, and not only their wait
    first_at: float | None = None
    last_at: float = 0.0

    def begin(self, rank: int, at: float) -> None:
        """Take the beginning of a worker."""
        self._worker(rank, at).begin(at)

    def report(self, event: Event) -> None:
        """Take a report of a worker, of the store whose steps are shown."""
        rank = event["rank"]
        self._worker(rank, event["at"]).add(event)
        self.has_phases |= "compute_s" in event
        self.steps.add(rank, event.get("steps", ()))
        self.last_at = max(self.last_at, event["at"])

    def measure(self, event: Event) -> None:
        """Take the loss and the accuracy of some training samples."""
        loss, accuracy = (math.nan if event[name] is None else event[name] for name in ("loss", "accuracy"))
        self.training_by_epoch.add(event["epoch"], event["samples"], loss, accuracy)

    def _worker(self, rank: int, at: float) -> WorkerHistory:
        self.first_at = at if self.first_at is None else min(self.first_at, at)
        return self.workers.setdefault(rank, WorkerHistory())
