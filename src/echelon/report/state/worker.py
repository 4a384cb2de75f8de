"""One worker of a run, as of its last report."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from echelon.cluster.messages import Departure

LOADING, REGISTERED, FIRST_STEP = "loading data", "registered", "first step"
TRAINING, FINISHED, STOPPED = "training", "finished", "stopped"  # stopped: at the end, but not after all steps
REPORT_S = 1.0  # workers report more often than that while they make steps
GONE = tuple(departure.value for departure in Departure)  # the phases of workers that left before they finished


RECENT_STEPS = 15


class Step(NamedTuple):
    """One step: when it ended, and the seconds of its phases (`train/trainer/step_times.py`)."""

    end: float
    compute: float
    push: float
    wait: float
    pull: float


@dataclass(slots=True)
class WorkerState:
    """One worker, as of its last report."""

    rank: int
    phase: str = FIRST_STEP
    clock: int = 0
    samples: int = 0
    compute_s: float = 0.0
    push_s: float = 0.0
    wait_s: float = 0.0
    pull_s: float = 0.0
    other_s: float = 0.0  # validation and checkpoints
    bytes: dict[str, int] = field(default_factory=dict)  # pushed, pulled, sent, received
    steps: deque[Step] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))  # the last ones
    staleness: dict[str, int] = field(default_factory=dict)  # steps by updates missed between a read and its push
    rounds_ahead: dict[str, int] = field(default_factory=dict)  # steps by rounds ahead of the slowest worker
    reported_at: float = 0.0
    rate: float = 0.0
    seconds: float = 0.0
    batches_per_epoch: int = 0  # 0: not known yet
    num_epochs: int = 0
    device: str = ""  # the model of its GPU, or cpu
    num_devices: int = 1
    first_step: int = 0  # steps of the run before this worker began
    loss: float | None = None  # of the training samples since the last event
    accuracy: float | None = None
    first_report: tuple[float, float] | None = None  # time and `steps_done` of the first report with a step
    epochs: float | None = None  # of the whole job, with a fraction, if leases follow the workers' speeds
    clock_before: int = 0  # the steps of earlier processes of this rank, which died
    samples_before: int = 0
    deaths: int = 0
    restarts: int = 0
    store: int | None = None  # the number of the store whose steps are shown, of those that the worker has open

    @property
    def all_steps(self) -> int:
        """The steps of all processes of this rank."""
        return self.clock_before + self.clock

    @property
    def all_samples(self) -> int:
        """The samples of all processes of this rank. Those of a dead one end with its last report."""
        return self.samples_before + self.samples

    def successor(self, at: float) -> WorkerState:
        """Return the next process of this rank, after this one has died."""
        return WorkerState(
            self.rank,
            reported_at=at,
            clock_before=self.all_steps,
            samples_before=self.all_samples,
            deaths=self.deaths,
            restarts=self.restarts + 1,
        )

    @property
    def finished(self) -> bool:
        """Whether the worker came to a regular end, after its last step or because the run was stopped."""
        return self.phase in (FINISHED, STOPPED)

    @property
    def is_gone(self) -> bool:
        """Whether the worker left before it had finished."""
        return self.phase in GONE

    @property
    def epochs_done(self) -> float:
        """The epochs done, with a fraction."""
        if self.epochs is not None:
            return self.epochs
        return (self.first_step + self.clock) / self.batches_per_epoch if self.batches_per_epoch else 0.0

    @property
    def steps_done(self) -> float:
        """The part of `num_steps` that is done: own steps, or as many as the epochs of the whole job amount to."""
        return self.clock if self.epochs is None else self.epochs * self.batches_per_epoch - self.first_step

    @property
    def num_steps(self) -> int:
        """The steps from its beginning to the end of the run; 0 if not known."""
        return max(0, self.num_epochs * self.batches_per_epoch - self.first_step)

    def seconds_left(self, now: float) -> float | None:
        """Return the expected time to the end of this worker, or None before its second report."""
        if self.first_report is None or not self.num_steps:
            return None
        began, done = self.first_report
        if self.steps_done <= done:
            return None
        per_step = (self.reported_at - began) / (self.steps_done - done)
        since = min(now - self.reported_at, max(per_step, REPORT_S))  # a worker that waits does not come nearer
        return max(0.0, per_step * (self.num_steps - self.steps_done) - since)


def sum_histograms(histograms: Iterable[dict[str, int]]) -> dict[int, int]:
    """Add histograms whose keys are numbers as text, as in JSON; the result is sorted by number."""
    total: dict[int, int] = {}
    for histogram in histograms:
        for value, count in histogram.items():
            total[int(value)] = total.get(int(value), 0) + count
    return dict(sorted(total.items()))


def mean_and_max(histogram: dict[str, int]) -> tuple[float, int]:
    """Return the mean and the largest value of a histogram; 0 for an empty one."""
    total = sum(histogram.values())
    mean = sum(int(value) * count for value, count in histogram.items()) / total if total else 0.0
    return mean, max(map(int, histogram), default=0)
