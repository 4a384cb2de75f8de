"""What the live page shows of a run at one moment, as plain data. A pure function of the state of the run."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from echelon.report.follow import PIECE_BYTES, RunFiles
from echelon.report.state.run import RunState
from echelon.report.state.worker import FINISHED, STOPPED, TRAINING, WorkerState, mean_and_max
from echelon.report.terminal import lines

SILENT_S = 15.0  # workers and servers report every second
MOST_FAULTS = 12
MOST_VALIDATIONS = 8
VALIDATING = "validating"

# How something is, for its colour. The text beside it says the same.
GOOD, BUSY, WARN, BAD, DONE = "good", "busy", "warn", "bad", "done"
_TONES = {TRAINING: GOOD, FINISHED: DONE, "left": DONE, STOPPED: WARN, "failed": BAD, "died": BAD}


class Mean(msgspec.Struct, frozen=True):
    """The mean and the largest value of a histogram, and the histogram."""

    mean: float
    largest: int
    steps: dict[str, int]


class Worker(msgspec.Struct, frozen=True):
    """One worker. `tone` is the colour of `state`; `note` says what is unusual about it."""

    rank: int
    state: str
    tone: str
    note: str = ""
    group: int | None = None
    epochs_done: float = 0.0
    clock: int = 0
    samples: int = 0
    samples_per_s: float | None = None
    seconds: dict[str, float] = {}  # by phase of a step: compute, push, wait, pull
    own_s: float | None = None
    late_s: float | None = None
    slowness: float | None = None  # own_s as a multiple of the median; None if it is not slow
    missed: Mean = Mean(0.0, 0, {})  # updates missed between a read and its push
    ahead: Mean = Mean(0.0, 0, {})  # rounds ahead of the slowest worker
    loss: float | None = None
    accuracy: float | None = None
    bytes: dict[str, int] = {}
    reported_at: float | None = None

    def part(self, phase: str) -> float:
        """Return the part of its time that the worker has spent in a phase, from 0 to 1."""
        total = sum(self.seconds.values())
        return self.seconds.get(phase, 0.0) / total if total else 0.0


class Run(msgspec.Struct, frozen=True):
    """The run as a whole. `status` is one word; `message` explains what is unusual."""

    name: str
    title: str
    status: str
    tone: str
    message: str
    progress: str  # as "epoch 3 of 16"
    fraction: float | None
    seconds: float
    seconds_left: float | None
    samples: int
    samples_per_s: float
    num_workers: int
    training: int  # workers that train
    fraction_read: float
    unreadable_lines: int


class Server(msgspec.Struct, frozen=True):
    """One server: its counters, and the reason of the last decision of its scheme."""

    rank: int
    state: str
    tone: str
    store: int = 0
    pushes: int = 0
    updates: int = 0
    held: int = 0
    sent: int = 0
    received: int = 0
    memory_bytes: int = 0
    cpu_s: float = 0.0
    decision: str = ""


class Slow(msgspec.Struct, frozen=True):
    """A worker whose own time per step is long, whatever the others do, and why."""

    rank: int
    factor: float
    own_s: float
    median_s: float
    why: str


class Store(msgspec.Struct, frozen=True):
    """A store of the job, its scheme, and the reason of the scheme's last decision."""

    number: int
    name: str
    scheme: str
    staleness: int | None
    decision: str


class Fault(msgspec.Struct, frozen=True):
    """Something that went wrong, or that was mended, and when: seconds since the beginning."""

    seconds: float
    kind: str
    text: str
    tone: str


class Curve(msgspec.Struct, frozen=True):
    """Loss and accuracy over the seconds since the beginning, as columns."""

    seconds: list[float]
    loss: list[float | None]
    accuracy: list[float | None]


class Snapshot(msgspec.Struct, frozen=True):
    """A run at one moment."""

    at: float
    run: Run
    workers: list[Worker]
    servers: list[Server]
    stores: list[Store]
    slow: list[Slow]
    faults: list[Fault]  # the latest first
    fault_counts: dict[str, int]  # of all faults, by kind
    training: Curve
    validation: Curve
    epochs: list[float | None]  # of the validations


def snapshot(state: RunState, files: RunFiles, now: float) -> Snapshot:
    """Return what the page shows at the time `now`."""
    began = state.began or now
    validations = [*state.validations, *([state.final] if state.final else [])]
    slow: list[Slow] = []
    return Snapshot(
        at=now,
        run=_run(state, files, now),
        workers=_workers(state, {one.rank: one for one in slow}, now),
        servers=[],
        stores=[],
        slow=slow,
        faults=[],
        fault_counts={},
        training=_curve([(p["seconds"], p["loss"], p["accuracy"]) for p in state.training.points()]),
        validation=_curve([(v.get("seconds", v["at"] - began), v["loss"], v["accuracy"]) for v in validations]),
        epochs=[event.get("epoch") for event in validations],
    )


def _curve(points: Sequence[tuple[float, float | None, float | None]]) -> Curve:
    columns = list(zip(*points, strict=True)) or [(), (), ()]
    seconds, loss, accuracy = columns
    return Curve([round(value or 0.0, 3) for value in seconds], list(map(_finite, loss)), list(map(_finite, accuracy)))


def _finite(value: float | None) -> float | None:
    """Return a value that JSON can hold."""
    return value if value is not None and math.isfinite(value) else None


def _run(state: RunState, files: RunFiles, now: float) -> Run:
    status, tone, message = _status(state, files, now)
    ended = status in (FINISHED, STOPPED) or files.exit_status is not None
    return Run(
        name=files.folder.name,
        title="",
        status=status,
        tone=tone,
        message=message,
        progress=lines.epoch_text(state) if state.has_trained else "",
        fraction=state.fraction_done,
        seconds=state.seconds,
        seconds_left=None if ended else state.seconds_left(now),
        samples=state.samples,
        samples_per_s=sum(worker.rate for worker in state.active)
        if state.active and not ended
        else state.samples / max(1e-9, state.seconds),
        num_workers=len(state.workers),
        training=len(state.active),
        fraction_read=files.fraction_read,
        unreadable_lines=files.unreadable,
    )


def _status(state: RunState, files: RunFiles, now: float) -> tuple[str, str, str]:
    """Return the state of the run in a word, its tone, and a sentence where the word is not enough."""
    if not files.exists:
        return "deleted", BAD, "The folder of this run was deleted. This is the last state that was read."
    if files.last_event is None:
        return "waiting", BUSY, "The job has not written any event yet."
    if files.fraction_read < 1.0 and files.total_bytes - files.read_bytes > PIECE_BYTES:
        return "reading", BUSY, f"Reading the log of the run: {files.fraction_read:.0%}."
    if files.exit_status is not None:
        return _end(files.exit_status)
    silent = now - files.last_event
    if state.has_trained and not state.active:
        left = [worker for worker in state.ranked if not worker.finished]
        if silent <= SILENT_S or not left:
            return FINISHED, DONE, ""
    if silent > SILENT_S:
        return "silent", WARN, f"No event for {lines.duration(silent)}. The job may have ended without a last event."
    if not state.has_trained:
        return lines.STARTING, BUSY, ""
    return (VALIDATING, GOOD, lines.validation_progress(state)) if state.validating else (TRAINING, GOOD, "")


def _end(exit_status: int) -> tuple[str, str, str]:
    if not exit_status:
        return FINISHED, DONE, ""
    if exit_status > 128:
        return STOPPED, WARN, f"A signal stopped the run (exit status {exit_status})."
    return "failed", BAD, f"The run failed with exit status {exit_status}."


def _workers(state: RunState, slow: dict[int, Slow], now: float) -> list[Worker]:
    waiting = [name for name in state.processes if name.startswith("worker ")]
    early = {int(name.split()[1]): state.processes[name] for name in waiting}
    shown = [Worker(rank, phase, BUSY) for rank, phase in early.items() if rank not in state.workers] + [
        _worker(worker, slow.get(worker.rank), now) for worker in state.ranked
    ]
    return sorted(shown, key=lambda worker: worker.rank)


def _worker(worker: WorkerState, slow: Slow | None, now: float) -> Worker:
    silent = now - worker.reported_at
    note, tone = "", _TONES.get(worker.phase, BUSY)
    if worker.phase == TRAINING and silent > SILENT_S:
        note, tone = f"no report for {lines.duration(silent)}", WARN
    return Worker(
        rank=worker.rank,
        state=worker.phase,
        tone=tone,
        note=note,
        epochs_done=worker.epochs_done,
        clock=worker.clock,
        samples=worker.samples,
        samples_per_s=None if worker.is_gone or worker.finished else worker.rate,
        seconds={"wait": worker.wait_s},
        slowness=slow.factor if slow else None,
        missed=_mean(worker.staleness),
        ahead=_mean(worker.rounds_ahead),
        loss=worker.loss,
        accuracy=worker.accuracy,
        reported_at=worker.reported_at,
    )


def _mean(histogram: dict[str, int]) -> Mean:
    return Mean(*mean_and_max(histogram), histogram)
