"""Reads a trainer's log and events. `echelon.report.logs` reads MXNet's log lines, with any prefix before them.

The speed of a run is the median of its speed lines after the step was compiled. Each line is the mean over its batches,
so the spread is that of lines and not of single steps. Every worker logs its own training accuracy and seconds of an
epoch; a run's are their means.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from echelon.bench.harness.turns import percentile
from echelon.observe.events import EventReader
from echelon.report.logs.epochs import Training
from echelon.report.logs.lines import Kind, SpeedFigure, figures_of

_COMPILED = re.compile(r"compiling the step took (\d+(?:\.\d*)?) s")
_ENGINE = re.compile(r":(engine .*)$")
_PRECISION = re.compile(r":(precision .*)$")


@dataclass(slots=True)
class Log:
    """The numbers of one run. Speeds are in the order of the log; figures of an epoch are by its number, from 0."""

    speeds: list[float] = field(default_factory=list)
    train: dict[int, float] = field(default_factory=dict)
    validation: dict[int, float] = field(default_factory=dict)
    epoch_s: dict[int, float] = field(default_factory=dict)
    compile_s: float | None = None
    engine: str = ""
    precision: str = ""


@dataclass(frozen=True, slots=True)
class Speed:
    """Median, 10th and 90th percentile of the speed lines, and their number."""

    median: float
    p10: float
    p90: float
    lines: int


def read_log(text: str) -> Log:
    """Read every known line, in order, and ignore the others. Values that are nan or inf are not measurements."""
    log, training = Log(), Training()
    for line in text.splitlines():
        for figure in figures_of(line):
            training.add(figure)
            if isinstance(figure, SpeedFigure) and math.isfinite(figure.samples_per_s):
                log.speeds.append(figure.samples_per_s)
        _read_line(log, line)
    log.train, log.validation = _means(training, "train", "accuracy"), _means(training, "validation", "accuracy")
    log.epoch_s = _means(training, "time", "")
    return log


def _means(training: Training, kind: Kind, name: str) -> dict[int, float]:
    means = {number: epoch.mean(kind, name) for number, epoch in training.epochs.items()}
    return {number: mean for number, mean in means.items() if mean is not None and math.isfinite(mean)}


def _read_line(log: Log, line: str) -> None:
    if found := _COMPILED.search(line):
        log.compile_s = float(found[1])
        log.speeds.clear()  # earlier speeds include compiling
    elif found := _ENGINE.search(line):
        log.engine = found[1]
    elif found := _PRECISION.search(line):
        log.precision = found[1]


def read_curve(run_dir: Path) -> list[tuple[float, float]]:
    """Return seconds since the start of training and accuracy of all validations of a run; none without events."""
    events = [event for event in EventReader(run_dir).poll() if event["event"] == "validation"]
    return [(event["seconds"], event["accuracy"]) for event in events if "seconds" in event]


def speed_of(speeds: Sequence[float]) -> Speed | None:
    """Return the statistics of the speed lines; None if there are none."""
    if not speeds:
        return None
    p10, median, p90 = (percentile(speeds, share) for share in (0.1, 0.5, 0.9))
    return Speed(median, p10, p90, len(speeds))
