"""Real jobs: `echelon launch` around any command, or around faults/worker.py with a plan of signals to send.

At clock c a worker of a plan pushes a gradient that is 1 at [c, its rank] and 0 elsewhere. It pushes it to a key on one
server and to a key that is split over all servers; plain SGD with learning rate 1 subtracts it. The final weights
therefore show how often each push was applied: -1 once, 0 never, -2 twice.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from leaks import marked_processes, read_environment
from ports import free_port

TESTS = Path(__file__).parent
PATHS = {"PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])}
MARK = "ECHELON_TEST_JOB"
STALL_SECONDS = "60"  # on a busy machine a job may start slowly; no stall report is wanted then
CLOCKS = 8
BEFORE_PUSH, AFTER_PUSH, IN_PULL = "before push", "after push", "in pull"
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Fault:
    """A signal to one process. A worker sends it to itself; worker 0 sends it to servers and the scheduler."""

    role: str
    rank: int
    clock: int
    point: str = BEFORE_PUSH
    signal: int = signal.SIGKILL

    @property
    def by(self) -> int:
        """Return the rank of the worker that sends the signal."""
        return self.rank if self.role == "worker" else 0


@dataclass(frozen=True, slots=True)
class Gate:
    """Worker `rank` pushes `clock` only after worker `gone` has left its view, or after the file `opened` exists."""

    rank: int
    clock: int
    gone: int | None = None
    opened: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What the workers of a job do."""

    store: str
    num_workers: int
    staleness: int | None = None
    groups: list[list[int]] | None = None
    clocks: int = CLOCKS
    faults: list[Fault] = field(default_factory=list)
    gates: list[Gate] = field(default_factory=list)
    together: bool = False  # each push asks for the new weights, too

    @classmethod
    def from_json(cls, text: str) -> Plan:
        data = json.loads(text)
        faults = [Fault(**fault) for fault in data.pop("faults")]
        return cls(**data | {"faults": faults, "gates": [Gate(**gate) for gate in data.pop("gates")]})

    def applied(self, rank: int, clock: int) -> bool:
        """Return whether a worker lives long enough for its gradient of a clock to be applied."""
        ends = [fault for fault in self.faults if (fault.role, fault.rank) == ("worker", rank)]
        return all(clock < end.clock or (clock == end.clock and end.point != BEFORE_PUSH) for end in ends)

    def table(self) -> list[list[float]]:
        """Return the expected final weights under a scheme without weighting."""
        return [[-float(self.applied(rank, c)) for rank in range(self.num_workers)] for c in range(self.clocks)]


def until(condition: Callable[[], Any], what: str, timeout_s: float = 30.0) -> Any:
    """Wait until the condition is true, and return its value; fail after `timeout_s`."""
    end = time.monotonic() + timeout_s
    while not (found := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.01)
    return found


class Job:
    """A launched job. As a context manager it ends every process of the job on exit."""

    def __init__(
        self,
        folder: Path,
        plan: Plan | None = None,
        *,
        num_servers: int = 1,
        num_workers: int | None = None,
        command: Sequence[str] = (),
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.plan = plan
        self.run = folder / "run"
        self.run.mkdir(parents=True)
        self._mark = secrets.token_hex(8)
        workers = plan.num_workers if plan is not None else num_workers
        program = list(command)
        if plan is not None:
            program = [sys.executable, str(TESTS / "faults" / "worker.py"), json.dumps(asdict(plan))]
        arguments = ["launch", "-n", str(workers), "-s", str(num_servers), "--run-dir", str(self.run)]
        arguments += ["--stall-seconds", STALL_SECONDS, *options]
        self._out, self._err = folder / "out", folder / "err"
        self.began = time.monotonic()
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.launcher = subprocess.Popen(
                [sys.executable, "-m", "echelon.cli.main", *arguments, *program],
                cwd=folder,
                stdout=out,
                stderr=err,
                env={**os.environ, **PATHS, MARK: self._mark, **(environment or {})},
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in [self.launcher.pid, *self.processes()]:
            if pid != self.launcher.pid or self.launcher.poll() is None:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.launcher.wait()

    def wait(self, timeout_s: float = 90.0) -> int:
        """Wait for the launcher and return its exit status; fail if a process of the job outlives it."""
        status = self.launcher.wait(timeout_s)
        assert self.processes() == [], "the launcher left processes behind"
        return 128 - status if status < 0 else status

    def processes(self) -> list[int]:
        """Return the living processes of the job."""
        return marked_processes(MARK, self._mark)

    def pid(self, role: str, rank: int) -> int:
        """Return the process id of a role and rank of this job."""
        return pid_of(role, rank, self.processes(), self.run)

    @property
    def out(self) -> str:
        """Return the output of the job's processes."""
        return self._out.read_text()

    @property
    def err(self) -> str:
        """Return the launcher's own messages."""
        return self._err.read_text()

    def events(self, kind: str) -> list[Row]:
        """Return the events of one kind."""
        return [row for row in rows(self.run / "events.jsonl") if row["event"] == kind]

    def fired(self) -> list[Row]:
        """Return the faults that happened, each with the process id and the time."""
        return rows(self.run / "faults.jsonl")

    def results(self) -> dict[int, Row]:
        """Return the results of the workers that finished, by rank."""
        found = [json.loads(path.read_text()) for path in sorted(self.run.glob("result-*.json"))]
        return {row["rank"]: row for row in found}

    def at_clock(self, rank: int, clock: int) -> bool:
        """Return whether a worker has reached a clock."""
        return (self.run / f"at-{rank}-{clock}").exists()


class ByHand:
    """A job whose processes are started one by one, with the environment variables of MXNet's launchers."""

    def __init__(self, folder: Path, num_workers: int, num_servers: int, environment: Mapping[str, str]) -> None:
        port = free_port()
        self._folder = folder
        self._mark = secrets.token_hex(8)
        self._common = {
            "DMLC_PS_ROOT_URI": "127.0.0.1",
            "DMLC_PS_ROOT_PORT": str(port),
            "DMLC_NUM_WORKER": str(num_workers),
            "DMLC_NUM_SERVER": str(num_servers),
            "ECHELON_STALL_SECONDS": STALL_SECONDS,
            MARK: self._mark,
            **environment,
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: Sequence[str], **more: str) -> subprocess.Popen[bytes]:
        """Start a process; the first word of its name is its role."""
        environment = {**os.environ, **PATHS, **self._common, "DMLC_ROLE": name.split()[0], **more}
        with (self._folder / name).open("wb") as out:
            self.processes[name] = subprocess.Popen(
                command, cwd=self._folder, stdout=out, stderr=subprocess.STDOUT, env=environment
            )
        return self.processes[name]

    def out(self, name: str) -> str:
        """Return the output of a process."""
        return (self._folder / name).read_text()

    def statuses(self, timeout_s: float = 60.0) -> dict[str, int]:
        """Return the exit status of every process."""
        end = time.monotonic() + timeout_s
        return {name: process.wait(end - time.monotonic()) for name, process in self.processes.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


def rows(path: Path) -> list[Row]:
    """Return the complete lines of a JSON-lines file."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def pid_of(role: str, rank: int, among: Iterable[int], run: Path) -> int:
    """Return the process with this role and rank."""
    found: int = until(lambda: _find_pid(role, rank, among, run), f"a process that is {role} {rank}", 10.0)
    return found


def _find_pid(role: str, rank: int, among: Iterable[int], run: Path) -> int | None:
    """Find servers and workers by their registration, because the environment of a forked process cannot be read."""
    registered = f"{role} {rank} (pid "
    for event in reversed(rows(run / "events.jsonl")):  # the last one, because a process may have been restarted
        if event["event"] == "registered" and event["who"].startswith(registered):
            return int(event["who"].removeprefix(registered).split()[0])
    for pid in among:
        variables = read_environment(pid)
        if (variables.get("DMLC_ROLE"), variables.get("ECHELON_RANK")) == (role, str(rank)):
            return pid
    return None
