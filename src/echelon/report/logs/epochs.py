"""The figures of a training by epoch, from the logs of one worker or of many, in one file or in several.

As in MXNet's parse_log, a figure of an epoch is the mean over all lines that have it, which are those of the workers.
Values that are not finite are left out of the mean and counted, unless no other is there.

The speed of a job is the sum over its workers. If lines do not say which worker wrote them, a file with several workers
shows as many lines for the same batches as it has workers, and their mean counts for each of them.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add

from echelon.errors import DataError, UsageError, unknown_name
from echelon.report.logs.files import STDIN, read_lines
from echelon.report.logs.lines import EpochFigure, Figure, Kind, SpeedFigure, figures_of

Worker = str  # "worker 3", or "" for the workers of a file whose lines do not name them


@dataclass(slots=True)
class Epoch:
    """The lines of one epoch, which counts from 0."""

    number: int
    values: dict[tuple[Kind, str], list[float]] = field(default_factory=dict)  # by kind and name of the metric
    speeds: dict[Worker, list[SpeedFigure]] = field(default_factory=dict)

    def mean(self, kind: Kind, name: str = "") -> float | None:
        """Return the mean over the workers; None if no line has this figure."""
        values = self.values.get((kind, name), [])
        counted = [value for value in values if math.isfinite(value)] or values
        return reduce(add, counted, 0.0) / len(counted) if values else None  # added in order, as MXNet adds them

    def worker_speed(self, worker: Worker) -> float | None:
        """Return the samples per second of one worker over the batches of its lines.

        MXNet's clock can stand still or go back, which gives speeds that are infinite or negative.
        """
        found = [line.samples_per_s for line in self._counted(worker) if _is_speed(line)]
        return statistics.harmonic_mean(found) if found else None

    def speed(self) -> float | None:
        """Return the samples per second of all workers together."""
        known = [(worker, speed) for worker in self.speeds if (speed := self.worker_speed(worker)) is not None]
        return sum(speed * self._num_workers(worker) for worker, speed in known) if known else None

    def num_speeds(self) -> tuple[int, int]:
        """Return how many speeds the lines of all workers have, and how many of them are not in a mean."""
        lines = [line for worker in self.speeds for line in self._counted(worker)]
        return len(lines), sum(not _is_speed(line) for line in lines)

    def _counted(self, worker: Worker) -> list[SpeedFigure]:
        """Return the speed lines of a worker without those that MXNet repeats for further metrics."""
        lines = self.speeds.get(worker, [])
        first = next((line.metrics[0][0] for line in lines if line.is_per_metric), None)
        return [line for line in lines if not line.is_per_metric or line.metrics[0][0] == first]

    def _num_workers(self, worker: Worker) -> int:
        """Return how many workers wrote lines under one name."""
        return 1 if worker else max(Counter((line.first, line.last) for line in self._counted(worker)).values())


@dataclass(slots=True)
class Training:
    """The epochs of a log, in the order in which they first appear, and what the reader has left out."""

    epochs: dict[int, Epoch] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def speed_notes(self) -> list[str]:
        """Which speeds are not in the means."""
        counts = {epoch.number: epoch.num_speeds() for epoch in self.epochs.values()}
        return [
            f"epoch {number + 1}: {bad} of {total} speeds are nan, inf, negative or 0 and are not in its mean"
            for number, (total, bad) in counts.items()
            if bad
        ]

    @property
    def metrics(self) -> list[str]:
        """The names of all metrics, in the order of their lines."""
        return list(dict.fromkeys(name for epoch in self.epochs.values() for _, name in epoch.values if name))

    @property
    def workers(self) -> list[Worker]:
        """The names of all workers that have speed lines, by rank."""
        found = {worker for epoch in self.epochs.values() for worker in epoch.speeds}
        return sorted(found, key=lambda name: (len(name), name))

    def add(self, figure: Figure, alone: Worker = "") -> None:
        """Add a figure. `alone` is the name of the worker if the line has none."""
        if isinstance(figure, EpochFigure) and figure.batch is not None:
            return  # of a validation in the middle of an epoch
        epoch = self.epochs.setdefault(figure.epoch, Epoch(figure.epoch))
        if isinstance(figure, EpochFigure):
            epoch.values.setdefault((figure.kind, figure.name), []).append(figure.value)
        else:
            worker = alone if figure.worker is None else f"worker {figure.worker}"
            epoch.speeds.setdefault(worker, []).append(figure)

    def choose(self, names: Sequence[str]) -> dict[str, str]:
        """Return the metric for each given name, which may be the beginning of its name; all if none is given."""
        return {name: _metric(name, self.metrics) for name in names or self.metrics}


def _is_speed(line: SpeedFigure) -> bool:
    return 0 < line.samples_per_s < math.inf


def _metric(name: str, known: Sequence[str]) -> str:
    matching = [metric for metric in known if metric == name] or [metric for metric in known if metric.startswith(name)]
    if len(matching) > 1:  # MXNet mixes them
        raise UsageError(f"--metric-names {name} is the beginning of {' and '.join(matching)}; give a whole name")
    if not matching:
        raise unknown_name("metric", name, known) if known else UsageError(f"the log has no line of the metric {name}")
    return matching[0]


def read_logs(paths: Sequence[str]) -> Training:
    """Read the logs of one training: one file with all workers, or one file per worker."""
    repeated = next((path for path, count in Counter(paths).items() if count > 1), None)
    if repeated is not None:
        raise UsageError(f"{repeated} is given twice; its lines would count twice")
    training = Training()
    for index, path in enumerate(paths):
        _read(path, f"worker {index}" if len(paths) > 1 else "", training)
    _note_values_that_are_not_finite(training)
    return training


def _read(path: str, alone: Worker, training: Training) -> None:
    decimals: dict[str, int] = {}
    num_figures = 0
    name = "standard input" if path == STDIN else path
    for number, line, is_complete in read_lines(path):
        try:
            figures = list(figures_of(line))
        except DataError as error:
            if is_complete:
                raise DataError(f"{name}:{number}: {error}; correct the line or delete it") from None
            figures = None
        if figures is None or (not is_complete and _is_cut(figures, decimals)):
            training.notes.append(f"{name}:{number}: the last line is not complete and is left out")
            break
        for figure in figures:
            num_figures += 1
            training.add(figure, alone)
            if isinstance(figure, EpochFigure):
                decimals[figure.kind] = figure.decimals
    if not num_figures:
        raise DataError(
            f"{name} has no line of an epoch, such as: Epoch[0] Train-accuracy=0.912345; give the output of a training"
        )


def _is_cut(figures: Iterable[Figure], decimals: Mapping[str, int]) -> bool:
    """Return whether a last line without its end has fewer digits than the lines of its kind before it."""
    return any(isinstance(one, EpochFigure) and one.decimals < decimals.get(one.kind, 0) for one in figures)


def _note_values_that_are_not_finite(training: Training) -> None:
    for epoch in training.epochs.values():
        for (kind, name), values in epoch.values.items():
            bad = sum(not math.isfinite(value) for value in values)
            if 0 < bad < len(values):
                label = f"{kind}-{name}".rstrip("-")
                training.notes.append(
                    f"epoch {epoch.number + 1}: {bad} of {len(values)} values of {label} are nan or inf "
                    "and are not in its mean"
                )
