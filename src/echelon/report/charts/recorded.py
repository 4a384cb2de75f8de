"""A recorded run: what the files in its folder say."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from echelon.cluster.messages import Departure
from echelon.errors import DataError, UsageError
from echelon.observe.events import FILE_NAME
from echelon.report.charts.history import History
from echelon.report.charts.verdicts import Verdicts
from echelon.report.follow import RunFollower, run_folder
from echelon.report.state.run import Event, RunState
from echelon.report.summary import FILE_NAME as SUMMARY
from echelon.report.summary import exit_words

FAILED = (Departure.FAILED.value, Departure.DIED.value)
STILL_RUNS_S = 15.0  # workers and servers write events more often than that


@dataclass
class RecordedRun:
    """A run: its state at the end of its events, its history, and what `summary.json` adds, if there is one."""

    name: str
    folder: Path
    state: RunState = field(default_factory=RunState)
    history: History = field(default_factory=History)
    verdicts: Verdicts = field(default_factory=Verdicts)
    summary: dict[str, Any] = field(default_factory=dict)
    num_events: int = 0
    unreadable: int = 0  # lines that are cut off, or no event that this version can read
    first_at: float = 0.0
    last_at: float = 0.0

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The options of `echelon train`; empty for a program of the user."""
        given = self.summary.get("settings")
        recorded = (given if isinstance(given, dict) else None) or self.state.settings or {}
        return {name: value for name, value in recorded.items() if name not in ("at", "who", "event")}

    @property
    def store(self) -> str | None:
        """The name of the first store."""
        first = self.state.stores[min(self.state.stores)] if self.state.stores else {}
        return first.get("name") or self.summary.get("store") or self.settings.get("kv_store")

    @property
    def bound(self) -> int | None:
        """How many rounds a worker may be ahead of the slowest one; None: no bound."""
        bounds = [store.get("staleness") for store in self.state.stores.values()] or [self.settings.get("staleness")]
        return next((bound for bound in bounds if isinstance(bound, int)), None)

    @property
    def environment(self) -> dict[str, str]:
        """The command, the commit, the machine and the number of processes, as far as they were recorded."""
        job = self.state.job or {}
        machine = job.get("machine") or {}
        cores = (
            f"{machine.get('cpu')}, {machine.get('cores')} cores, {machine.get('memory_gib')} GiB" if machine else ""
        )
        devices = {worker.device for worker in self.state.ranked if worker.device not in ("", "cpu")}
        found = {
            "command": job.get("command"),
            "workers": job.get("num_workers") or len(self.state.workers),
            "servers": job.get("num_servers"),
            "machine": cores,
            "GPU": ", ".join(sorted(devices)),
            "kernel": machine.get("kernel"),
            "Python": machine.get("python"),
            "torch": machine.get("torch"),
            "Echelon": job.get("version"),
            "commit": _short_commit(job.get("commit") or ""),
        }
        return {name: str(value) for name, value in found.items() if value not in (None, "")}

    @property
    def start(self) -> float:
        """When the first worker began: the zero of the time axes."""
        return self.state.began or self.history.first_at or self.first_at

    @property
    def seconds(self) -> float:
        """The time from the beginning to the end of the last worker, or to its last report."""
        return max(self.state.seconds, self.history.last_at - self.start, 0.0)

    @property
    def samples_per_s(self) -> float:
        """The samples of all workers per second of the run."""
        return self.state.samples / self.seconds if self.seconds else 0.0

    def remember(self, state: RunState, event: Event) -> None:
        """Add an event, which the state has taken, to the history."""
        match event["event"]:
            case "begin":
                self.history.begin(event["rank"], event["at"])
            case "progress" | "done":
                worker = state.workers[event["rank"]]
                is_last = event["event"] == "done" or not worker.finished
                if is_last and worker.store == event.get("store", 0):
                    self.history.report(event)
            case "training":
                self.history.measure(event)
        self.verdicts.judge(state, event["at"])
        self.num_events += 1
        self.first_at = min(self.first_at or event["at"], event["at"])
        self.last_at = max(self.last_at, event["at"])

    def worker_label(self, rank: int) -> str:
        """Return the name of a worker, and how it left if that was before its end."""
        worker = self.state.workers.get(rank)
        return f"worker {rank}" + (f", {worker.phase}" if worker is not None and worker.phase in FAILED else "")

    def status(self, now: float | None = None) -> str:
        """Return how the run ended, or that it still runs."""
        if isinstance(status := self.summary.get("exit_status"), int):
            return _exit_text(status)
        if self.state.workers and not self.state.active:
            failed = sum(worker.phase in FAILED for worker in self.state.ranked)
            return f"ended; {failed} of {len(self.state.workers)} workers failed" if failed else "finished"
        idle = (time.time() if now is None else now) - self.last_at
        return "running" if idle < STILL_RUNS_S else "did not end: its events stop before the end of training"


def read_runs(paths: Sequence[str]) -> list[RecordedRun]:
    """Read the runs in these folders. Two runs with the same name are told apart by their folders."""
    runs = [read_run(find_run(path)) for path in paths]
    folders, names = [run.folder.resolve() for run in runs], [run.name for run in runs]
    for run, folder in zip(runs, folders, strict=True):
        if folders.count(folder) > 1:
            raise UsageError(f"the run {run.folder} is given twice; name each run once")
        if names.count(run.name) > 1:
            run.name = str(Path(folder.parent.name) / folder.name)
    return runs


def find_run(path: str) -> Path:
    """Return the folder of a run that has events, wherever `run_folder` finds it."""
    folder = run_folder(path)
    if not (folder / FILE_NAME).is_file():
        inside = sorted(one.parent.name for one in folder.glob(f"*/{FILE_NAME}"))
        advice = f"; it contains runs: give {folder / inside[0]}" if inside else ""
        raise UsageError(f"{path} is not a run: it has no {FILE_NAME}{advice}")
    return folder


def read_run(folder: Path) -> RecordedRun:
    """Read the events of a run, and its summary if it has one."""
    run = RecordedRun(folder.resolve().name, folder)
    follower = RunFollower(folder.resolve(), run.remember)
    run.state = follower.state
    follower.read_all()
    run.unreadable = follower.files.unreadable
    if not run.num_events:
        lines = f"; {run.unreadable} lines are not events" if run.unreadable else ""
        raise DataError(f"{folder / FILE_NAME} contains no event{lines}: the run has not begun, or its log was lost")
    run.summary = _summary(folder / SUMMARY)
    return run


def _exit_text(status: int) -> str:
    word, name = exit_words(status)
    return f"{word} (exit status {status}{name and f', {name}'})" if status else word


def _short_commit(commit: str) -> str:
    name, _, state = commit.partition("-")
    return f"{name[:12]}-{state}" if state else name[:12]


def _summary(path: Path) -> dict[str, Any]:
    """Return the contents of `summary.json`; empty without one, or if a crash cut it off."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError):
        return {}
