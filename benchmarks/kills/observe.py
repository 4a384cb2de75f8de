"""Runs one case: kills the process, and records what the others do."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.kills.cases import KILL_AT, NUM_STEPS, NUM_WORKERS, Case, Command
from echelon.observe.events import EventReader

START_S = 120.0
_STEP = re.compile(rb"worker (\d+) step (\d+)")
_MARK = "ECHELON_KILLS"


@dataclass(slots=True)
class Observation:
    """What was seen. Times are seconds after the kill."""

    system: str
    killed: str
    observed_s: float  # until the job ended, or until the observation did
    ended: bool
    status: int | None  # of the process that the user started, or of the workers; None while it runs
    longest_pause_s: float  # without a step of any worker, after the kill
    steps_before: int  # by all workers together
    steps_after: int
    steps_needed: int  # of all workers together, for the whole training
    left_running: int  # processes of the job when the observation ended
    last_lines: list[str] = field(default_factory=list)


class _Progress:
    """The steps that workers print, with the time of each."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, int, int]] = []  # time, worker, step
        self.lines: list[str] = []

    def read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            found = _STEP.findall(line)  # lines of several processes may be joined
            self.steps += [(time.monotonic(), int(worker), int(step)) for worker, step in found]
            if not found:
                self.lines.append(line.decode(errors="replace").rstrip())

    def furthest(self) -> dict[int, int]:
        """Return each worker's last step."""
        return {worker: step for _, worker, step in list(self.steps)}


@contextmanager
def _started(commands: list[Command], mark: str, progress: _Progress) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    processes: dict[str, subprocess.Popen[bytes]] = {}
    readers = []
    for command in commands:
        process = subprocess.Popen(
            command.arguments,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **command.environment, _MARK: mark},
        )
        processes[command.name] = process
        readers.append(threading.Thread(target=progress.read, args=(process,), daemon=True))
        readers[-1].start()
    try:
        yield processes
    finally:
        for one in _marked(mark):
            with suppress(psutil.Error):
                one.kill()
        for process in processes.values():
            process.kill()
            process.wait()
        for reader in readers:
            reader.join(10)


def observe(case: Case, observe_s: float) -> Observation:
    """Run a case and return what was seen."""
    progress, mark = _Progress(), f"{os.getpid()}-{time.monotonic_ns()}"
    with _started(list(case.commands), mark, progress) as processes:
        _wait_for_steps(progress, processes)
        pid = _pid_of(case, processes, mark)
        killed_at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        while time.monotonic() - killed_at < observe_s and _marked(mark):
            time.sleep(0.1)
        observed_s = time.monotonic() - killed_at
        left = len(_marked(mark))
        ended = left == 0
        status = next(iter(processes.values())).poll() if len(processes) == 1 else None
    after = [(at - killed_at, worker, step) for at, worker, step in progress.steps if at > killed_at]
    times = [0.0, *(at for at, _, _ in after), *([] if ended else [observed_s])]
    return Observation(
        case.system,
        case.killed,
        round(observed_s, 1),
        ended,
        status,
        round(max((b - a for a, b in itertools.pairwise(times)), default=observed_s), 2),
        len(progress.steps) - len(after),
        len(after),
        NUM_STEPS * NUM_WORKERS,
        left,
        progress.lines[-3:],
    )


def _wait_for_steps(progress: _Progress, processes: dict[str, subprocess.Popen[bytes]]) -> None:
    end = time.monotonic() + START_S
    while len(progress.furthest()) < NUM_WORKERS or min(progress.furthest().values()) < KILL_AT:
        if time.monotonic() > end or all(process.poll() is not None for process in processes.values()):
            raise RuntimeError("the job did not start:\n" + "\n".join(progress.lines[-20:]))
        time.sleep(0.01)


def _marked(mark: str) -> list[psutil.Process]:
    """Return the living processes of a job."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and process.pid != os.getpid() and process.environ().get(_MARK) == mark:
                found.append(process)
    return found


def _pid_of(case: Case, processes: dict[str, subprocess.Popen[bytes]], mark: str) -> int:
    if case.victim in processes:
        return processes[case.victim].pid
    if case.run is not None:
        return _registered_pid(case.victim, case.run)
    rank = case.victim.split()[1]
    return int(next(process.pid for process in _marked(mark) if process.environ().get("RANK") == rank))


def _registered_pid(victim: str, run: Path) -> int:
    """Return the process id that a process of Echelon registered with, or the scheduler's own."""
    for event in EventReader(run).poll():
        if victim == "scheduler 0" and event["event"] == "scheduler_started":
            return int(event["pid"])
        found = re.match(rf"{victim} \(pid (\d+)", str(event.get("who", "")))
        if event["event"] == "registered" and found:
            return int(found[1])
    raise RuntimeError(f"{victim} is not registered in {run}")
