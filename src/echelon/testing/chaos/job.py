"""One job under faults: its processes, what its events say, and its end."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, Self

from echelon.environment import HISTORY
from echelon.observe.events import EventReader
from echelon.testing.faults import Fault, faults_in

POLL_S = 0.02
LAST_LINES = 5  # of a worker that could not join
FINISHED = "it finished"  # why a worker left, as a view says
JOIN = [sys.executable, "-m", "echelon"]
_JOIN = re.compile(r"can join this job: echelon (join .*)")
_MEMBER = re.compile(r"(worker|server|scheduler) (\d+) \(pid (\d+)")
Event = dict[str, Any]
Place = tuple[str, int]  # role and rank


@dataclass(frozen=True, slots=True)
class Setting:
    """What a job is: its scheme and its sizes."""

    store: str
    transport: str
    num_workers: int = 3
    num_servers: int = 2
    replicas: int = 0
    epochs: int = 60
    samples: int = 240
    batch_size: int = 8
    step_s: float = 0.005
    message_faults: Sequence[Fault] = ()
    trains: bool = False  # as `echelon train` does, with validation and a result; otherwise the loop of `worker`

    def __str__(self) -> str:
        return f"{self.store} {self.transport} replicas={self.replicas}{' train' if self.trains else ''}"

    def command(self, run: Path) -> list[str]:
        """Return the command that starts the job."""
        launch = [sys.executable, "-m", "echelon", "launch", "-n", str(self.num_workers), "-s", str(self.num_servers)]
        launch += ["--transport", self.transport, "--replicas", str(self.replicas), "--run-dir", str(run)]
        launch += ["--max-restarts", "1000", "--max-workers", str(self.num_workers + 2)]
        if self.store in ("dist_ssync", "dist_gsync"):
            launch += ["--staleness", "3"]
        if self.store == "dist_gsync":
            launch += ["--groups", "0,1/" + ",".join(str(rank) for rank in range(2, self.num_workers))]
        return [*launch, *self.program()]

    def program(self) -> list[str]:
        """Return the command of a worker."""
        if self.trains:
            options = {"kv_store": self.store, "num_epochs": self.epochs, "num_examples": self.samples}
            options |= {"batch_size": self.batch_size, "pace": {"seconds": self.step_s}, "num_val_examples": 32}
            return [sys.executable, "-m", "echelon.train", json.dumps(options)]
        program = [sys.executable, "-m", "echelon.testing.chaos.worker", "--kv-store", self.store]
        program += ["--epochs", str(self.epochs), "--samples", str(self.samples), "--batch-size", str(self.batch_size)]
        return [*program, "--step-s", str(self.step_s)]


@dataclass
class Progress:
    """What the events of a job say so far."""

    pids: dict[Place, int] = field(default_factory=dict)
    workers: list[int] = field(default_factory=list)  # of the last view
    slices: list[tuple[int | None, int | None, bool]] = field(default_factory=list)  # primary, backup, is in sync
    updates: int = 0  # of originals, not of copies
    by_worker: Counter[int] = field(default_factory=Counter)  # updates with a gradient of this worker
    by_slice: Counter[int] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)  # events of each kind
    done: set[int] = field(default_factory=set)  # workers that are not in the view when one has finished
    updated_at: float = 0.0  # by the clock of this process

    def take(self, event: Event) -> None:
        """Take an event."""
        kind = event["event"]
        self.counts[kind] += 1
        match kind:
            case "registered" | "returned" | "joined":
                self._member(event["who"])
            case "scheduler_started":
                self.pids["scheduler", 0] = event["pid"]
            case "view":
                self.workers = event["workers"]
                self.slices = [(primary, backup, in_sync) for primary, backup, in_sync in event["slices"]]
                if event["departure"] == "left" and event["reason"].endswith(FINISHED):  # not one that was told to end
                    self.done.update(self.by_worker.keys() - set(event["workers"]))
            case "history":
                self._history(event)

    @property
    def lacks_backups(self) -> bool:
        """Whether a slice has no backup that has everything. Before the first view all have one, if any."""
        return any(backup is None or not in_sync for _, backup, in_sync in self.slices)

    @property
    def lacks_primaries(self) -> bool:
        """Whether nobody stores a slice."""
        return any(primary is None for primary, _, _ in self.slices)

    def _member(self, text: str) -> None:
        if found := _MEMBER.match(text):
            place = found[1], int(found[2])
            self.pids[place] = int(found[3])
            if found[1] == "worker" and place[1] not in self.workers:
                self.workers = sorted([*self.workers, place[1]])

    def _history(self, event: Event) -> None:
        if event["copy"]:
            return
        for _, _, _, parts, *_ in event.get("updates", ()):
            self.updates += 1
            self.by_slice[event["slice"]] += 1
            self.by_worker.update(worker for worker, _ in parts)
            self.updated_at = time.monotonic()


class Hang(Exception):
    """The job made no progress for too long."""


class JoinFailed(Exception):
    """A worker could not join the job."""


class Joiner(NamedTuple):
    """An `echelon join` that was started, and the file with its output."""

    process: subprocess.Popen[bytes]
    output: Path

    @property
    def has_failed(self) -> bool:
        """Whether it has ended with an error."""
        return bool(self.process.poll())

    def __str__(self) -> str:
        """Its exit status and its last lines."""
        lines = self.output.read_text(errors="replace").splitlines()
        return f"status {self.process.returncode}: {'; '.join(lines[-LAST_LINES:])}"


class ChaosJob:
    """A running job. As a context manager it ends all its processes."""

    def __init__(self, setting: Setting, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.setting = setting
        self.run = folder / "run"
        self.progress = Progress()
        self._reader = EventReader(self.run)
        self._output = (folder / "output").open("wb")
        self.output = folder / "output"
        more = {HISTORY: "1", "PS_HEARTBEAT_TIMEOUT": "3", **(environment or {})}
        more |= faults_in(setting.message_faults) if setting.message_faults else {}
        self._environment = {**os.environ, **more}
        self._started = [self._start(setting.command(self.run))]
        self.launcher = self._started[0]

    def _start(self, command: Sequence[str], output: BinaryIO | None = None) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            stdout=output or self._output,
            stderr=subprocess.STDOUT,
            env=self._environment,
            stdin=subprocess.DEVNULL,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._started:
            process.kill()  # its children end with it
            process.wait()
        for pid in self.progress.pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)  # one that is stopped would not notice
        self._output.close()

    @property
    def is_running(self) -> bool:
        """Whether the launcher has not ended."""
        return self.launcher.poll() is None

    def poll(self) -> None:
        """Read the new events."""
        for event in self._reader.poll():
            self.progress.take(event)

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float) -> bool:
        """Wait until the events fulfil a condition; return False if the job ends first. Raise Hang at the deadline."""
        end = time.monotonic() + timeout_s
        while True:
            self.poll()
            if condition():
                return True
            if not self.is_running:
                return False
            if time.monotonic() > end:
                raise Hang(f"{self.setting}: not within {timeout_s:g} s: {what}")
            time.sleep(POLL_S)

    def signal(self, place: Place, number: int) -> bool:
        """Send a signal to a process; return False if it has ended."""
        try:
            os.kill(self.progress.pids[place], number)
        except (KeyError, ProcessLookupError):
            return False
        return True

    def join(self) -> Joiner | None:
        """Start one more worker, with the command that the launcher has printed. Return None if it printed none."""
        found = _JOIN.search(self.output.read_text(errors="replace"))
        if found is None:
            return None
        path = self.output.with_name(f"join-{len(self._started)}")
        with path.open("wb") as output:
            joiner = Joiner(self._start([*JOIN, *shlex.split(found[1])], output), path)
        self._started.append(joiner.process)
        return joiner

    def raise_if_refused(self, joiner: Joiner) -> None:
        """Raise JoinFailed if a worker could not join, unless it came too late."""
        self.poll()
        if joiner.has_failed and self.is_running and not self.progress.done:
            raise JoinFailed(f"{self.setting}: a worker could not join, {joiner}")

    def status(self, timeout_s: float) -> int:
        """Wait for the end and return the exit status. Raise Hang at the deadline."""
        end = time.monotonic() + timeout_s
        while self.is_running:
            before = self.progress.updates
            self.poll()
            if self.progress.updates > before:
                end = time.monotonic() + timeout_s
            if time.monotonic() > end:
                raise Hang(f"{self.setting}: no update and no end within {timeout_s:g} s")
            time.sleep(POLL_S)
        return self.launcher.returncode
