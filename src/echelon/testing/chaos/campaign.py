"""Jobs one after the other, with one fault at a time, until the time is over."""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from echelon.faults import Fault, Kind
from echelon.testing.chaos.injections import INJECTIONS, Injection
from echelon.testing.chaos.job import ChaosJob, Hang, JoinFailed, Setting
from echelon.testing.faults import Fired, fired
from echelon.testing.history import Report, check

STORES = ("dist_sync", "dist_async", "dist_ssync", "dist_gsync")
TRANSPORTS = ("shm", "tcp")
START_S = 90.0
END_S = 60.0
LONGER = 5
EPOCHS_PER_FAULT = 30  # of a message
GAP_UPDATES = (20, 200)  # between two faults
_NOTICED_S = 0.1  # after a message was lost, until others have to wait for it
MESSAGE_KINDS = (Kind.DROP, Kind.DUPLICATE, Kind.REPLAY, Kind.REORDER, Kind.DELAY, Kind.CUT)


@dataclass
class Outcome:
    """What one job did."""

    setting: Setting
    faults: Counter[str] = field(default_factory=Counter)
    status: int | None = None
    hang: str | None = None
    seconds: float = 0.0
    report: Report = field(default_factory=Report)
    pauses: dict[str, float] = field(default_factory=dict)  # the longest one after a fault of each kind
    folder: Path | None = None  # if something was wrong
    failure: str | None = None  # of a fault: a worker could not join

    @property
    def is_good(self) -> bool:
        """Whether the job ended with status 0 and a history without problems."""
        return self.hang is None and self.failure is None and self.status == 0 and not self.report.problems


@dataclass(frozen=True, slots=True)
class Plan:
    """What a campaign does."""

    minutes: float
    seed: int
    stores: Sequence[str] = STORES
    transports: Sequence[str] = TRANSPORTS
    kinds: Sequence[str] = tuple(INJECTIONS)
    epochs: int = 600
    replicas: int | None = None  # None: three of four jobs have backups
    jobs: int | None = None  # at most
    keep: Path | None = None  # where the folders of bad jobs stay


def run(plan: Plan) -> Iterator[Outcome]:
    """Yield the outcome of each job."""
    draw = random.Random(plan.seed)
    end = time.monotonic() + 60 * plan.minutes
    count = 0
    while time.monotonic() < end and (plan.jobs is None or count < plan.jobs):
        store, transport = plan.stores[count % len(plan.stores)], draw.choice(plan.transports)
        drawn = int(draw.random() < 0.75)
        replicas = drawn if plan.replicas is None else plan.replicas
        setting = Setting(store, transport, replicas=replicas, epochs=plan.epochs)
        if draw.random() < 0.33:  # the same number of samples, in fewer epochs, because each one ends with a validation
            longer = min(LONGER, plan.epochs)
            setting = replace(setting, trains=True, epochs=plan.epochs // longer, samples=setting.samples * longer)
        last = setting.epochs * setting.samples // setting.batch_size // setting.num_workers
        faults = [_message_fault(draw, last) for _ in range(max(4, plan.epochs // EPOCHS_PER_FAULT))]
        setting = replace(setting, message_faults=faults)
        with _folder(plan.keep, count) as folder:
            outcome = run_job(setting, [INJECTIONS[kind] for kind in plan.kinds], draw, folder)
            outcome.folder = None if outcome.is_good else folder
        yield outcome
        count += 1


@contextmanager
def _folder(keep: Path | None, number: int) -> Iterator[Path]:
    if keep is not None:
        folder = keep / f"job-{number}"
        folder.mkdir(parents=True)
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="echelon-chaos-") as name:
        yield Path(name)


def _message_fault(draw: random.Random, last: int) -> Fault:
    """Return a fault of a worker's push or of the answer to it, at a random clock up to the last one."""
    kind = draw.choice(MESSAGE_KINDS)
    way = draw.choice(("send", "answer")) if kind in (Kind.DROP, Kind.DUPLICATE) else "send"
    return Fault(kind, "worker", draw.randrange(3), draw.randrange(10, last), f"{way}.Push", seconds=0.3)


def run_job(setting: Setting, kinds: Sequence[Injection], draw: random.Random, folder: Path) -> Outcome:
    """Run a job, with faults until it ends, and check its history."""
    outcome = Outcome(setting)
    injected: list[tuple[str, float, float]] = []  # kind, and the times of the fault and of the recovery
    began = time.monotonic()
    with ChaosJob(setting, folder) as job:
        try:
            job.wait_until(lambda: job.progress.updates > 0, "the first update", START_S)
            while _wait_for_gap(job, draw):
                possible = [kind for kind in kinds if kind.is_possible(job)]
                chosen = draw.choice(possible)
                outcome.faults[chosen.name] += 1
                injected_at = time.time()
                recovered = chosen.act(job, draw)
                injected.append((chosen.name, injected_at, time.time()))
                if not recovered:
                    break
            outcome.status = job.status(END_S)
        except Hang as hang:
            outcome.hang = str(hang)
        except JoinFailed as failed:
            outcome.failure = str(failed)
    outcome.seconds = time.monotonic() - began
    messages = fired(job.run)
    outcome.faults.update(f"message: {one.kind}" for one in messages)
    ended = outcome.status == 0
    outcome.report = check(job.run, num_samples=setting.samples, ended=ended, all_named=True)
    outcome.pauses = _pauses(outcome.report, injected, messages)
    outcome.report.update_times.clear()
    return outcome


def _pauses(
    report: Report, injected: Sequence[tuple[str, float, float]], messages: Sequence[Fired]
) -> dict[str, float]:
    """Return the longest pause after a fault of each kind. A pause with a fault of a message is due to that one."""
    pauses: dict[str, float] = {}
    times = [one.at + late_s for one in messages for late_s in (0.0, _NOTICED_S)]
    for kind, begin, end in injected:
        pauses[kind] = max(pauses.get(kind, 0.0), report.pause_between(begin, end, times))
    for one in messages:
        kind = f"message: {one.kind}"
        pauses[kind] = max(pauses.get(kind, 0.0), report.pause_between(one.at, one.at + _NOTICED_S))
    return pauses


def _wait_for_gap(job: ChaosJob, draw: random.Random) -> bool:
    """Let the job make a random number of updates. Return False if it ends, or if a worker has finished."""
    until = job.progress.updates + draw.randint(*GAP_UPDATES)
    return (
        job.wait_until(
            lambda: job.progress.updates >= until or bool(job.progress.done), "updates between faults", END_S
        )
        and not job.progress.done
    )
