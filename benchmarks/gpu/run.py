"""Runs rows as processes: first the speed rows, one at a time, then the others, several at a time.

The commands are those that a user types, but with this interpreter as `python` and this code as `echelon`, so that
nothing needs to be installed. A row that fails or exceeds its time limit becomes a record with an error, and the next
row starts. When this process ends for any reason, it ends its child processes.
"""

from __future__ import annotations

import selectors
import shlex
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.gpu.log import read_curve, read_log
from benchmarks.gpu.results import Origin, Record, missing_figures
from benchmarks.gpu.rows import Row
from echelon.bench.harness.process import ContenderProcess, ProcessSpec
from echelon.errors import UsageError

REPORT_S = 15.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How rows are run. `examples` contains the training scripts; `log_dir` receives one log file per row."""

    examples: Path
    log_dir: Path
    origin: Origin
    data_dir: str | None = None
    jobs: int = 1
    budget_s: float = float("inf")
    limit_s: float = 1800.0


def command_of(row: Row, plan: Plan) -> list[str]:
    """Return the command line of the process to start."""
    script = plan.examples / row.script
    if not script.exists():
        raise UsageError(
            f"{row.name}: {script} does not exist; give the folder of the training scripts with --examples"
        )
    trainer = [sys.executable, str(script), *_arguments(row, plan.origin.extra, plan.data_dir)]
    if not row.launch:
        return trainer
    events = ["--run-dir", str(run_dir(row, plan))] if row.to_accuracy is not None else []
    return [sys.executable, "-m", "echelon.cli.main", "launch", *shlex.split(row.launch), *events, *trainer]


def run_dir(row: Row, plan: Plan) -> Path:
    """Return the folder of a scheme row's events, which contain the times of its validations."""
    return plan.log_dir / row.name


def shown_command(row: Row, extra: str, data_dir: str | None = None) -> str:
    """Return the command as a user types it, without the paths of this machine."""
    events = "--run-dir DIR " if row.to_accuracy is not None else ""
    launch = f"echelon launch {row.launch} {events}" if row.launch else ""
    return f"{launch}python {row.script} {shlex.join(_arguments(row, extra, data_dir and 'DIR'))}"


def _arguments(row: Row, extra: str, data_dir: str | None) -> list[str]:
    where = ["--data-dir", data_dir] if data_dir and row.reads_data else []
    return [*shlex.split(row.arguments), *where, *shlex.split(extra)]


class Running:
    """A row that is running."""

    def __init__(self, row: Row, plan: Plan) -> None:
        self.row = row
        self.began = time.monotonic()
        self.date = datetime.now(UTC).isoformat(timespec="seconds")
        log_path = plan.log_dir / f"{row.name}.log"
        log_path.unlink(missing_ok=True)  # a process appends to its log, which may be there from an earlier run
        shutil.rmtree(run_dir(row, plan), ignore_errors=True)
        self.member = ContenderProcess(ProcessSpec(row.name, command_of(row, plan)), log_path)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    def last_line(self) -> str:
        """Return the last line of its log."""
        lines = self._text().splitlines()
        return lines[-1] if lines else "(no output yet)"

    def finish(self, plan: Plan, jobs: int) -> Record:
        """End its processes and return its record. A log without the figures is an error even if the run succeeded."""
        status, wall_s = self.member.exit_status(), self.seconds
        ended = f"exit status {status}" if status is not None else f"ended by its time limit of {plan.limit_s:g} s"
        error = "" if status == 0 else f"{ended}; {self.last_line()}"
        self.member.close()
        log = read_log(self._text())
        curve = read_curve(run_dir(self.row, plan))
        return Record(
            name=self.row.name,
            kind=self.row.kind,
            command=shown_command(self.row, plan.origin.extra, plan.data_dir),
            date=self.date,
            origin=plan.origin,
            jobs=jobs,
            wall_s=round(wall_s, 2),
            error=error or missing_figures(self.row, log, curve),
            engine=log.engine,
            precision=log.precision,
            compile_s=log.compile_s,
            speeds=log.speeds,
            train_accuracy=log.train,
            validation_accuracy=log.validation,
            epoch_s=log.epoch_s,
            curve=curve,
        )

    def _text(self) -> str:
        return self.member.log_path.read_text(encoding="utf-8", errors="replace")


class Runner:
    """Runs rows. It calls `done` with each record when its row ends, and `progress` with lines to display."""

    def __init__(self, plan: Plan, done: Callable[[Record], None], progress: Callable[[str], None]) -> None:
        if plan.jobs < 1:
            raise UsageError(f"--jobs must be 1 or more, not {plan.jobs}")
        self._plan = plan
        self._done = done
        self._progress = progress
        self._began = time.monotonic()
        self._running: list[Running] = []

    def run(self, rows: Sequence[Row]) -> list[Row]:
        """Run the rows and return those that were not started because the budget was spent."""
        for row in rows:
            command_of(row, self._plan)  # report a missing script before the first row runs
        self._plan.log_dir.mkdir(parents=True, exist_ok=True)
        alone = [row for row in rows if row.kind == "speed"]
        together = [row for row in rows if row.kind != "speed"]
        return [*self._run_some(alone, 1), *self._run_some(together, self._plan.jobs)]

    def _run_some(self, rows: Sequence[Row], jobs: int) -> list[Row]:
        waiting = deque(rows)
        try:
            while waiting or self._running:
                while waiting and len(self._running) < jobs and not self._spent():
                    self._start(waiting.popleft())
                if not self._running:
                    break
                self._wait()
                self._collect(jobs)
        finally:
            while self._running:
                self._running.pop().member.close()
        return list(waiting)

    def _spent(self) -> bool:
        return time.monotonic() - self._began >= self._plan.budget_s

    def _start(self, row: Row) -> None:
        self._progress(f"{row.name}: {shown_command(row, self._plan.origin.extra, self._plan.data_dir)}")
        self._running.append(Running(row, self._plan))

    def _wait(self) -> None:
        """Wait until a row ends or reaches its time limit; report progress every REPORT_S seconds."""
        with selectors.DefaultSelector() as selector:
            for one in self._running:
                selector.register(one.member.pidfd, selectors.EVENT_READ)
            left_s = min(self._plan.limit_s - one.seconds for one in self._running)
            while left_s > 0 and not selector.select(min(left_s, REPORT_S)):
                for one in self._running:
                    self._progress(f"  {one.row.name}, {one.seconds:.0f} s: {one.last_line()}")
                left_s = min(self._plan.limit_s - one.seconds for one in self._running)

    def _collect(self, jobs: int) -> None:
        for one in list(self._running):
            if one.member.exit_status() is not None or one.seconds >= self._plan.limit_s:
                record = one.finish(self._plan, jobs)
                self._running.remove(one)
                if record.error:
                    self._progress(one.member.last_lines())
                self._done(record)
