"""What the live page shows of a run at one moment, as plain data. A pure function of the state of the run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import msgspec

from echelon.report.follow import RunFiles
from echelon.report.state.job import job_info_of
from echelon.report.state.run import Event, RunState
from echelon.report.state.run import Fault as RunFault
from echelon.report.state.server import ServerState
from echelon.report.state.slowness import Slow, own_times, slow_workers
from echelon.report.state.worker import FINISHED, STOPPED, TRAINING, WorkerState, mean_and_max
from echelon.report.terminal import lines
from echelon.report.terminal.screen import VALIDATION_SHOWN_S
from echelon.report.terminal.status import BAD, BUSY, DONE, FINISHING, GOOD, SILENT_S, WARN, Status, run_status

MOST_FAULTS = 12
PHASES = ("compute", "push", "wait", "pull", "other")  # other: validation and checkpoints

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
    seconds: dict[str, float] = {}  # by phase: compute, push, wait, pull, other
    recent: dict[str, float] = {}  # the same of the last steps; of all steps after the last one
    own_s: float | None = None
    late_s: float | None = None
    slowness: float | None = None  # own_s as a multiple of the median; None if it is not slow
    missed: Mean = Mean(0.0, 0, {})  # updates missed between a read and its push
    ahead: Mean = Mean(0.0, 0, {})  # rounds ahead of the slowest worker
    loss: float | None = None
    accuracy: float | None = None
    bytes: dict[str, int] = {}
    reported_at: float | None = None

    def part(self, phase: str) -> float | None:
        """Return the part of its recent time that the worker has spent in a phase, from 0 to 1."""
        total = sum(self.recent.values())
        return self.recent.get(phase, 0.0) / total if total else None


class Run(msgspec.Struct, frozen=True):
    """The run as a whole. `status` is one word; `message` explains what is unusual."""

    name: str
    title: str
    status: str
    tone: str
    message: str
    progress: str  # as "epoch 3 of 16"
    validating: str  # how far a validation is that takes long
    fraction: float | None
    seconds: float
    seconds_left: float | None
    samples: int
    samples_per_s: float
    num_workers: int
    num_servers: int
    training: int  # workers that train
    fraction_read: float
    unreadable_lines: int


class Server(msgspec.Struct, frozen=True):
    """One server: what it has done, and what it uses."""

    rank: int
    state: str
    tone: str
    pushes: int = 0
    updates: int = 0
    held: int = 0
    sent: int = 0
    received: int = 0
    memory_bytes: int = 0
    cpu_s: float = 0.0
    cpu_load: float = 0.0  # cores
    updates_per_s: float = 0.0


class Store(msgspec.Struct, frozen=True):
    """A store of the job, its scheme, and the reason of the scheme's last decision."""

    number: int
    name: str
    scheme: str
    staleness: int | None
    decision: str


class Fault(msgspec.Struct, frozen=True):
    """A death, a return or a stall, and when: seconds since the beginning."""

    seconds: float
    kind: str
    who: str
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
    status = run_status(state, files, now)
    slow = slow_workers(state) if status.is_live else []
    reports_due_at = files.last_event if not files.exists else None if status.has_ended else now
    return Snapshot(
        at=now,
        run=_run(state, files, status, now),
        workers=_workers(state, {one.rank: one for one in slow}, reports_due_at),
        servers=[_server(server, reports_due_at) for _, server in sorted(state.servers.items())],
        stores=[_store(number, event, state) for number, event in sorted(state.stores.items())],
        slow=slow,
        faults=[_fault(fault, began) for fault in state.faults[: -MOST_FAULTS - 1 : -1]],
        fault_counts=dict(Counter(str(fault.kind) for fault in state.faults)),
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


def _run(state: RunState, files: RunFiles, status: Status, now: float) -> Run:
    info = job_info_of(state)
    mean_rate = state.samples / state.seconds if state.seconds else 0.0
    return Run(
        name=files.folder.name,
        title=info.title,
        status=status.word,
        tone=status.tone,
        message=status.message,
        progress=lines.ENDED if status.word == FINISHING else lines.epoch_text(state) if state.has_trained else "",
        validating=lines.validation_progress(state) if status.is_live and _validates_long(state, now) else "",
        fraction=state.fraction_done,
        seconds=state.seconds,
        seconds_left=state.seconds_left(now) if status.is_live and state.active else None,
        samples=state.samples,
        samples_per_s=sum(worker.rate for worker in state.active) if status.is_live and state.active else mean_rate,
        num_workers=max(info.num_workers, len(state.workers)),
        num_servers=info.num_servers,
        training=sum(worker.phase == TRAINING for worker in state.workers.values()) if status.is_live else 0,
        fraction_read=files.fraction_read,
        unreadable_lines=files.unreadable,
    )


def _validates_long(state: RunState, now: float) -> bool:
    return state.validating is not None and now - state.validating_since >= VALIDATION_SHOWN_S


def _workers(state: RunState, slow: dict[int, Slow], now: float | None) -> list[Worker]:
    """Return the workers that have begun and those that are about to; `now` is None after the end of the run."""
    times = own_times(state)
    late = {rank: one.late_s for server in state.servers.values() for rank, one in server.arrivals.items()}
    shown = []
    for rank in range(max(job_info_of(state).num_workers, max(state.workers, default=-1) + 1)):
        if (worker := state.workers.get(rank)) is None:
            shown.append(Worker(rank, state.processes.get(f"worker {rank}", lines.STARTING), BUSY))
            continue
        found = _worker(worker, now)
        shown.append(
            msgspec.structs.replace(
                found,
                group=state.group_of(rank),
                own_s=times.get(rank),
                late_s=late.get(rank),
                slowness=slow[rank].factor if rank in slow else None,
            )
        )
    return shown


def _worker(worker: WorkerState, now: float | None) -> Worker:
    silent_s = 0.0 if now is None else now - worker.reported_at
    is_active = not (worker.finished or worker.is_gone)
    is_silent = is_active and silent_s > SILENT_S
    phase = STOPPED if is_active and now is None else worker.phase
    return Worker(
        rank=worker.rank,
        state=phase,
        tone=WARN if is_silent else _TONES.get(phase, BUSY),
        note=f"no report for {lines.duration(silent_s)}" if is_silent else "",
        epochs_done=worker.epochs_done,
        clock=worker.clock,
        samples=worker.samples,
        samples_per_s=worker.rate if is_active and now is not None and not is_silent else None,
        seconds=(seconds := {phase: getattr(worker, f"{phase}_s") for phase in PHASES}),
        recent=_recent(worker) if is_active and worker.steps else seconds,
        missed=_mean(worker.staleness),
        ahead=_mean(worker.rounds_ahead),
        loss=worker.loss,
        accuracy=worker.accuracy,
        bytes=worker.bytes,
        reported_at=worker.reported_at,
    )


def _recent(worker: WorkerState) -> dict[str, float]:
    return {phase: sum(getattr(step, phase) for step in worker.steps) for phase in PHASES[:-1]}


def _mean(histogram: dict[str, int]) -> Mean:
    return Mean(*mean_and_max(histogram), histogram)


def _server(server: ServerState, now: float | None) -> Server:
    is_silent = now is not None and now - server.reported_at > SILENT_S
    names = ("rank", "pushes", "updates", "held", "sent", "received", "memory_bytes", "cpu_s")
    return Server(
        **{name: getattr(server, name) for name in names},
        state="silent" if is_silent else "",
        tone=WARN if is_silent else GOOD,
        cpu_load=server.cpu_load,
        updates_per_s=server.updates_per_s,
    )


def _store(number: int, event: Event, state: RunState) -> Store:
    name, scheme, staleness = event.get("name", ""), event.get("scheme", ""), event.get("staleness")
    return Store(number, name, scheme, staleness, state.newest_decision(number))


def _fault(fault: RunFault, began: float) -> Fault:
    tone = {"joined again": GOOD, "stall": WARN}.get(fault.kind, BAD)
    text = fault.text if fault.text.startswith(fault.who) else ": ".join(filter(None, [fault.who, fault.text]))
    return Fault(max(0.0, fault.at - began), fault.kind, fault.who, text, tone)
