"""Runs the experiments of a plan one at a time. A failed one does not stop the others.

SIGUSR1 ends the sweep after the current experiment, Ctrl-C and SIGTERM during it. The same command continues a sweep:
experiments whose log has a result are not repeated (`exp.rerun`).
"""

from __future__ import annotations

import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from echelon.atomic_file import write_json
from echelon.bench.dlbs.command import Run, checked_run
from echelon.bench.dlbs.configuration.experiment import Experiment
from echelon.bench.dlbs.execute import INTERRUPTED, Outcome, execute
from echelon.bench.dlbs.files import read_log, record_failure
from echelon.bench.dlbs.remaining import seconds_left, shown_left
from echelon.bench.dlbs.rerun import DISABLED, FAILURE, OK, SIMULATED, decide
from echelon.bench.dlbs.table import result_line
from echelon.errors import EchelonError

_EXISTING = "skipped"


class Sweep:
    """The state of a sweep: its outcomes so far, the bar on the terminal, and the progress file."""

    def __init__(self, experiments: Sequence[Experiment], progress_file: Path | None, *, verbose: bool) -> None:
        self._experiments = experiments
        self._progress_file = progress_file
        self._verbose = verbose
        self._started = datetime.now().isoformat(timespec="seconds")
        self._completed: list[dict[str, Any]] = []
        self._active: dict[str, Any] = {}
        self._stop = threading.Event()
        console = Console(file=sys.stderr)  # this one, because execute() redirects what others write to it
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("batches"),
            TimeElapsedColumn(),
            TextColumn("left: {task.fields[left]}"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("", total=sum(map(_batches, experiments)), left=shown_left(None))
        self._before = 0  # batches of the experiments that have ended
        self._durations: list[float] = []  # of the experiments that ran
        self._number, self._start_s = 0, 0.0  # of the current experiment
        self.outcomes: list[Outcome] = []

    def run(self) -> int:
        """Run all experiments; returns 0, 1 if one failed, or 130 after Ctrl-C."""
        with self, _on_signal(signal.SIGUSR1, self._request_stop):
            for number, experiment in enumerate(self._experiments, 1):
                if self._stop.is_set():
                    left = len(self._experiments) - number + 1
                    self._say(f"stopped by SIGUSR1, {left} experiments are left; the same command continues")
                    break
                outcome = self._run_one(number, experiment)
                self.outcomes.append(outcome)
                self._write_progress("inprogress")
                if outcome.status == INTERRUPTED:
                    self._say("the sweep was interrupted; the same command continues it")
                    break
        interrupted = any(one.status == INTERRUPTED for one in self.outcomes)
        is_whole = len(self.outcomes) == len(self._experiments) and not interrupted
        self._write_progress("completed" if is_whole else "interrupted")
        return 130 if interrupted else int(any(one.status == FAILURE for one in self.outcomes))

    def _run_one(self, number: int, experiment: Experiment) -> Outcome:
        self._number, self._start_s = number, time.monotonic()
        label = f"[{number}/{len(self._experiments)}] {experiment.title}"
        self._bar.update(self._task, description=label.replace("[", r"\["))
        outcome, how = self._outcome_of(experiment)
        self._before += _batches(experiment)
        self._durations += [outcome.seconds] if outcome.seconds else []
        self._bar.update(self._task, completed=self._before)
        took = f" ({outcome.seconds:.1f} s)" if outcome.seconds else f" ({how})" if how else ""
        self._say(f"{label}: {result_line(outcome)}{took}")
        entry = {"log_file": str(experiment.log_file), "exec_status": (how and _EXISTING) or "completed"}
        self._completed.append(entry | {"status": outcome.status, "message": outcome.message})
        self._active = {}
        return outcome

    def _outcome_of(self, experiment: Experiment) -> tuple[Outcome, str]:
        """Return how an experiment ends, and why it was not run, if so."""
        wanted = experiment.parameters["exp.status"]
        if wanted == "disabled":
            return Outcome(experiment, DISABLED), "exp.status is disabled"
        try:
            run = checked_run(experiment)
            if wanted == "simulate":
                self._say(f"  {shlex.join(run.command)}")
                return Outcome(experiment, SIMULATED), "exp.status is simulate"
            log = read_log(experiment.log_file)
            decision = decide(experiment.parameters, log)
            if decision.conflict:
                return Outcome(experiment, FAILURE, decision.reason), "not run"
            if not decision.runs and log is not None:
                return Outcome(experiment, log["exp.status"], log.get("exp.status_msg", ""), log), decision.reason
            return self._execute(run), ""
        except (EchelonError, OSError) as error:
            message = str(error) if isinstance(error, EchelonError) else f"{error.filename}: {error.strerror}"
            with suppress(EchelonError, OSError):  # the folder of the log may be what cannot be written
                record_failure(experiment, message)
            return Outcome(experiment, FAILURE, message), ""

    def _execute(self, run: Run) -> Outcome:
        self._active = {"log_file": str(run.experiment.log_file), "start_time": datetime.now().isoformat()}
        self._write_progress("inprogress")
        return execute(run, self._show_batches, self._say, self._say if self._verbose else lambda line: None)

    def _show_batches(self, done: int) -> None:
        share = done / _batches(self._experiments[self._number - 1])
        elapsed = time.monotonic() - self._start_s
        left = seconds_left(self._durations, elapsed, share, len(self._experiments) - self._number)
        self._bar.update(self._task, completed=self._before + done, left=shown_left(left))

    def _request_stop(self) -> None:
        self._stop.set()
        self._say("SIGUSR1: the sweep stops after the current experiment")

    def _say(self, line: str) -> None:
        self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def _write_progress(self, status: str) -> None:
        """Write the progress file, in the form that DLBS's web server reads."""
        if self._progress_file is None:
            return
        ran = [one for one in self._completed if one["exec_status"] == "completed"]
        existing = [one for one in self._completed if one["exec_status"] == _EXISTING]
        body = {
            "start_time": self._started,
            "end_time": None if status == "inprogress" else datetime.now().isoformat(timespec="seconds"),
            "status": status,
            "num_total_benchmarks": len(self._experiments),
            "num_active_benchmarks": sum(one.parameters["exp.status"] == "ok" for one in self._experiments),
            "num_inactive_benchmarks": sum(one.parameters["exp.status"] != "ok" for one in self._experiments),
            "num_completed_benchmarks": len(ran),
            "num_successful_benchmarks": sum(one["status"] == OK for one in ran),
            "num_failed_benchmarks": sum(one["status"] == FAILURE for one in ran),
            "num_existing_successful_benchmarks": sum(one["status"] == OK for one in existing),
            "num_existing_failed_benchmarks": sum(one["status"] == FAILURE for one in existing),
            "active_benchmark": self._active,
            "completed_benchmarks": self._completed,
        }
        write_json(self._progress_file, body)


def _batches(experiment: Experiment) -> int:
    return int(experiment.parameters["exp.num_warmup_batches"] + experiment.parameters["exp.num_batches"])


@contextmanager
def _on_signal(number: int, handle: Any) -> Iterator[None]:
    """Call a function when a signal arrives inside the block. Only the main thread can handle signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, lambda *_: handle())
    try:
        yield
    finally:
        signal.signal(number, before)
