"""The state of a run, collected from its events. The display, the summary and the curves are made from it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from echelon.cluster.messages import Departure
from echelon.report.state.resources import Resources
from echelon.report.state.server import ServerState
from echelon.report.state.time_curve import TimeCurve
from echelon.report.state.worker import (
    FINISHED,
    FIRST_STEP,
    LOADING,
    REGISTERED,
    STOPPED,
    TRAINING,
    Step,
    WorkerState,
)

Event = dict[str, Any]
MAX_FAULTS = 1000  # the newest
JOINED_AGAIN = "joined again"  # the kind of a fault: a worker that was lost is back
LOST = (Departure.FAILED.value, Departure.DIED.value)  # kinds of faults


@dataclass(frozen=True, slots=True)
class JobInfo:
    """What is known about a job before it starts. `title` is the first line of the display."""

    title: str
    num_workers: int
    num_servers: int = 0
    lock_step: bool = False  # no worker misses an update
    bounded: bool = False  # no worker is more rounds ahead of the slowest than a bound

    @property
    def num_processes(self) -> int:
        """The processes that the launcher starts; a job with servers has a scheduler, too."""
        return self.num_workers + (self.num_servers + 1 if self.num_servers else 0)


class Fault(NamedTuple):
    """A death, a departure, a return or a stall: when it happened, whom it concerns, and the reason."""

    at: float
    kind: str  # "died", "failed", "joined again", "stall"
    who: str
    text: str


class News(NamedTuple):
    """Something unusual, and the time when it happened. `passing`: it is over unless it is reported again."""

    at: float
    text: str
    passing: bool = False


@dataclass(slots=True)
class RunState:
    """A run, as of the events read so far."""

    workers: dict[int, WorkerState] = field(default_factory=dict)  # that have begun
    processes: dict[str, str] = field(default_factory=dict)  # "worker 3" -> what it does; others are starting
    validations: list[Event] = field(default_factory=list)
    validating: Event | None = None  # how far the present validation is
    validating_since: float = 0.0
    training: TimeCurve = field(default_factory=TimeCurve)
    epochs: dict[int, dict[int, Event]] = field(default_factory=dict)  # by number, from 1, and rank of the worker
    began: float | None = None
    ended: float | None = None
    final: Event | None = None
    warnings: list[str] = field(default_factory=list)
    news: list[News] = field(default_factory=list)
    job: Event | None = None  # how the run was started, and on which machine
    settings: Event | None = None  # the options of the training program
    stores: dict[int, Event] = field(default_factory=dict)  # by number: name, scheme, groups, staleness
    servers: dict[int, ServerState] = field(default_factory=dict)  # that have reported, by rank
    faults: list[Fault] = field(default_factory=list)
    partial: dict[tuple[int, int], int] = field(default_factory=dict)  # partial steps, by store and ledger
    ledgers: dict[tuple[int, int], Event] = field(default_factory=dict)  # how they were opened, by store and ledger
    trained: dict[tuple[int, int], int] = field(default_factory=dict)  # epochs that are complete, by store and ledger
    not_whole: str = ""  # why the result is not whole
    worker_addresses: set[str] = field(default_factory=set)
    resources: Resources = field(default_factory=Resources)  # while it trains

    def take(self, events: Iterable[Event]) -> None:
        """Update the state with new events."""
        for event in events:
            match event["event"]:
                case "loading":
                    self.processes[f"worker {event['rank']}"] = LOADING
                case "registered":
                    if name := re.match(r"(worker|server) \d+", event["who"]):
                        self.processes[name.group()] = REGISTERED
                    if found := re.match(r"worker \d+ \(pid \d+ on (\S+)\)", event["who"]):
                        self.worker_addresses.add(found[1])
                case "begin":
                    self._begin(event)
                case "progress" | "done":
                    self._report(event)
                case "training":
                    self._measure(event)
                case "epoch":
                    self.epochs.setdefault(event["epoch"], {})[event["rank"]] = event
                case "validation":
                    self._validate(event)
                case "final":
                    self.final, self.validating = event, None
                case "view":
                    self._leave(event)
                case "store_opened":
                    self._open_store(event)
                case "store_closed":
                    self._close_store(event)
                case "job":
                    self.job = event
                case "settings":
                    self.settings = event
                case "store":
                    self.stores[event["store"]] = event
                case "server":
                    self.servers.setdefault(event["rank"], ServerState(event["rank"])).take(event)
                case "resources" if self.has_trained and self.ended is None:
                    self.resources.take(event)
                case "epoch_trained":
                    self.partial[event["store"], event["ledger"]] = event["partial"]
                    self.trained[event["store"], event["ledger"]] = event.get("epochs", 0)
                case "ledger_opened":
                    self.ledgers[event["store"], event["ledger"]] = event
                case "not_whole":
                    self.not_whole = event["reason"]
                case "warning":
                    self.warnings.append(event["text"])
                    self.news.append(News(event["at"], event["text"]))
                case "stall":
                    self.news.append(News(event["at"], f"{event['who']} waits: {event['waiting']}", passing=True))
                    self._add_fault(event, "stall", event["who"], event["waiting"])

    def _begin(self, event: Event) -> None:
        rank = event["rank"]
        if rank in self.workers and self.workers[rank].is_gone:
            self._restart(rank, event)
        self.began = min(self.began or event["at"], event["at"])
        worker = self.workers.get(rank)
        if worker is None or worker.clock:
            worker = self.workers[rank] = WorkerState(rank)
        worker.phase, worker.reported_at = FIRST_STEP, event["at"]
        for name in ("batches_per_epoch", "num_epochs", "first_step"):
            setattr(worker, name, event.get(name, 0))
        worker.device, worker.num_devices = event.get("device", ""), event.get("num_devices", 1)
        self.processes[f"worker {rank}"] = FIRST_STEP

    def _restart(self, rank: int, event: Event) -> None:
        """Continue with another process of a rank whose last one is gone."""
        self.news.append(News(event["at"], f"worker {rank} joined again"))
        self._add_fault(event, JOINED_AGAIN, f"worker {rank}", "")
        self.workers[rank] = self.workers[rank].successor(event["at"])

    def _report(self, event: Event) -> None:
        worker = self.workers.setdefault(event["rank"], WorkerState(event["rank"], reported_at=event["at"]))
        store = event.get("store", 0)
        if worker.finished or store > (store if worker.store is None else worker.store):
            return
        worker.store = store
        elapsed = event["at"] - worker.reported_at
        if elapsed > 0.05:
            now = (event["samples"] - worker.samples) / elapsed
            worker.rate = now if not worker.rate else 0.6 * worker.rate + 0.4 * now
            worker.reported_at = event["at"]
        for name in ("clock", "samples", "wait_s", "staleness"):
            setattr(worker, name, event[name])
        for name in ("compute_s", "push_s", "pull_s", "other_s"):
            setattr(worker, name, event.get(name, 0.0))
        worker.epochs = event.get("epochs")
        worker.bytes = event.get("bytes", {})
        worker.steps.extend(Step(*step) for step in event.get("steps", ()))
        worker.rounds_ahead = event.get("rounds_ahead", {})
        if worker.clock and worker.first_report is None:
            worker.first_report = (event["at"], worker.steps_done)
        if worker.clock and not worker.is_gone:
            worker.phase = TRAINING
        if event["event"] == "done":
            worker.phase = STOPPED if worker.steps_done < worker.num_steps else FINISHED
            worker.seconds = event["seconds"]
            self.ended = max(self.ended or 0.0, event["at"])

    def _measure(self, event: Event) -> None:
        worker = self.workers.setdefault(event["rank"], WorkerState(event["rank"], reported_at=event["at"]))
        worker.loss, worker.accuracy = _number(event["loss"]), _number(event["accuracy"])
        seconds = event["at"] - (self.began or event["at"])
        self.training.add(seconds, event["samples"], worker.loss, worker.accuracy)

    def _validate(self, event: Event) -> None:
        """Take the progress of a validation (`done` of `total` samples) or its result."""
        if "accuracy" in event:
            self.validations.append(event)
            self.validating = None
        else:
            if self.validating is None:
                self.validating_since = event["at"]
            self.validating = event if event["done"] < event["total"] else None

    def _leave(self, event: Event) -> None:
        departure = event.get("departure")
        if departure in LOST:
            self.news.append(News(event["at"], event["reason"]))
        named = re.match(r"worker (\d+) ", event["reason"])  # also one that has trained all, and had yet to save it
        for worker in list(self.workers.values()):
            is_lost = departure in LOST and named is not None and int(named[1]) == worker.rank
            if worker.rank in event["workers"]:
                if worker.is_gone and departure == Departure.JOINED.value:
                    self._restart(worker.rank, event)
            elif not worker.is_gone and (is_lost or not worker.finished):
                worker.phase = event["departure"]
                if worker.phase != Departure.LEFT.value:
                    worker.deaths += 1
                    self._add_fault(event, worker.phase, f"worker {worker.rank}", event["reason"])

    def _add_fault(self, event: Event, kind: str, who: str, text: str) -> None:
        self.faults.append(Fault(event["at"], kind, who, text))
        del self.faults[:-MAX_FAULTS]

    def _open_store(self, event: Event) -> None:
        """Start again with a worker that had closed its stores, for example for the next fold of a cross-validation."""
        worker = self.workers.get(event["worker"])
        if worker is not None and worker.phase == Departure.LEFT.value:
            self.workers[worker.rank] = WorkerState(worker.rank, reported_at=event["at"])

    def _close_store(self, event: Event) -> None:
        """Show the steps of another store, or that the worker has left: a process may do other things after that."""
        worker = self.workers.get(event["worker"])
        if worker is None:
            return
        if event["store"] == worker.store:
            worker.store = None
        if not event["open"] and not (worker.finished or worker.is_gone):
            worker.phase = Departure.LEFT.value

    def utilisation(self, devices: Sequence[str]) -> float | None:
        """Return how busy the given devices of one worker are, from 0 to 1; None if it was not measured."""
        num_gpus = len({device for device in devices if device != "cpu"})
        return self.resources.utilisation(num_gpus, (self.job or {}).get("machine", {}).get("cores", 1))

    @property
    def num_machines(self) -> int:
        """The machines of the workers: those that the launcher named, or the addresses from which workers joined."""
        named: int = (self.job or {}).get("num_machines", 1)
        return max(len(self.worker_addresses), named)

    @property
    def has_trained(self) -> bool:
        """Whether a worker has run a step, or has finished without one."""
        return any(worker.clock or worker.finished for worker in self.workers.values())

    def group_of(self, rank: int) -> int | None:
        """Return the index of a worker's group, if its store has listed groups."""
        worker = self.workers.get(rank)
        store = self.stores.get((worker.store or 0) if worker else 0)
        groups = (store or {}).get("groups") or ()
        return next((index for index, group in enumerate(groups) if rank in group), None)

    def newest_decision(self, store: int) -> str:
        """Return the last decision of a store's scheme that a server has reported, with its reason."""
        found = [server.stores[store] for server in self.servers.values() if store in server.stores]
        newest = max((one for one in found if one["decision"]), key=lambda one: one["at"], default=None)
        return f"server {newest['rank']}: {newest['decision']}" if newest is not None else ""

    @property
    def active(self) -> list[WorkerState]:
        """The workers that train, in rank order."""
        return [worker for worker in self.ranked if not (worker.finished or worker.is_gone)]

    @property
    def ranked(self) -> list[WorkerState]:
        """All workers that have begun, in rank order."""
        return sorted(self.workers.values(), key=lambda worker: worker.rank)

    @property
    def samples(self) -> int:
        """The samples of all workers. A worker that died had trained some since its last report: ledgers count them."""
        by_store: dict[int, int] = {}
        for number, opened in self.ledgers.items():
            epochs = self.trained.get(number, 0) - opened.get("epoch", 0)
            if epochs > 0:
                by_store[number[0]] = by_store.get(number[0], 0) + epochs * opened["samples"] - opened.get("done", 0)
        reported = sum(worker.all_samples for worker in self.workers.values())
        return max([reported, *by_store.values()])

    @property
    def seconds(self) -> float:
        """The time from the start of the first worker to the end of the last one, or to the last report."""
        last = self.ended or max((worker.reported_at for worker in self.workers.values()), default=0.0)
        return max(0.0, last - self.began) if self.began else 0.0

    @property
    def fraction_done(self) -> float | None:
        """The part of its steps that the slowest worker has done; None if not known. The run ends when it ends."""
        parts = [worker.steps_done / worker.num_steps for worker in self.active if worker.num_steps]
        if not parts:
            return 1.0 if self.has_trained and not self.active else None
        return min(parts)

    def seconds_left(self, now: float) -> float | None:
        """Return the expected time until the slowest worker has finished, or None if a worker cannot tell yet."""
        left = [worker.seconds_left(now) for worker in self.active]
        known = [seconds for seconds in left if seconds is not None]
        return max(known, default=0.0) if len(known) == len(left) else None


def _number(value: float | None) -> float:
    """Return a measured value; JSON has null for NaN and infinity."""
    return float("nan") if value is None else value
