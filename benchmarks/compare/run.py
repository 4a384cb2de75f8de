"""Runs rows as processes, one after another, because figures of programs that share the cores mean nothing.

A row that fails or exceeds its time limit is an `Outcome` with the cause, and the next row starts. When this process
ends for any reason, so do its children.
"""

from __future__ import annotations

import selectors
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.compare.rows import Row, why_not
from echelon.bench.harness.process import ContenderProcess, ProcessSpec

REPORT_S = 30.0
STOP_S = 20.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How rows are run: commands start in `root`, their files go to `results` and `docs`, their output to `logs`."""

    root: Path
    results: Path
    docs: Path
    logs: Path
    quick: bool = False
    limit_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a row went. `error` is the cause of a failure; `skipped` says why a row was not started."""

    row: Row
    seconds: float = 0.0
    error: str = ""
    skipped: str = ""


def command_of(row: Row, plan: Plan) -> list[str]:
    """Return the command as a user types it, with the flags for its files."""
    words = [*row.words(quick=plan.quick), "--json", _shown_path(plan.results / row.file, plan.root)]
    return [*words, "--plot", _shown_path(plan.docs / row.picture, plan.root)] if row.picture else words


def process_words(command: Sequence[str]) -> list[str]:
    """Return the command with this interpreter and this code, so that nothing needs to be installed."""
    program = [sys.executable, "-m", "echelon"] if command[0] == "echelon" else [sys.executable]
    return [*program, *command[1:]]


def time_left_s(finished: Sequence[Outcome], waiting: Sequence[Row]) -> float:
    """Return about how long the waiting rows take, if they differ from the table as the finished ones did."""
    expected = sum(one.row.seconds for one in finished if not one.skipped)
    factor = sum(one.seconds for one in finished) / expected if expected else 1.0
    return factor * sum(row.seconds for row in waiting)


def run_rows(rows: Sequence[Row], plan: Plan, say: Callable[[str], None]) -> Iterator[Outcome]:
    """Run the rows in turn. `say` gets lines about the progress."""
    for folder in (plan.results, plan.docs, plan.logs):
        folder.mkdir(parents=True, exist_ok=True)
    finished: list[Outcome] = []
    for index, row in enumerate(rows):
        if reason := why_not(row, plan.root):
            say(f"[{index + 1}/{len(rows)}] {row.name}: not run, because {reason}")
            outcome = Outcome(row, skipped=reason)
        else:
            left = "" if plan.quick else f" (about {shown_s(time_left_s(finished, rows[index:]))} left)"
            say(f"[{index + 1}/{len(rows)}] {row.name}: {shlex.join(command_of(row, plan))}{left}")
            outcome = run_row(row, plan, say)
            say(f"    {outcome.error or 'done'}, {shown_s(outcome.seconds)}")
        finished.append(outcome)
        yield outcome


def run_row(row: Row, plan: Plan, say: Callable[[str], None]) -> Outcome:
    """Run one row and return how it went."""
    began = time.monotonic()
    log = plan.logs / f"{row.name}.log"
    log.unlink(missing_ok=True)
    words = process_words(command_of(row, plan))
    process = ContenderProcess(ProcessSpec(row.name, ["env", "-C", str(plan.root), *words]), log)
    try:
        _wait(process, began + plan.limit_s, lambda: say(f"    … {shown_s(time.monotonic() - began)}"))
        status = process.exit_status()
        last_lines = process.last_lines()
    finally:
        _stop(process)
    seconds = time.monotonic() - began
    if status == 0:
        return Outcome(row, seconds)
    how = f"status {status}" if status is not None else f"ended by its time limit of {plan.limit_s:g} s"
    return Outcome(row, seconds, error=f"FAILED ({how})\n{last_lines}")


def _stop(process: ContenderProcess) -> None:
    """End a row that still runs: let it remove what it has made, then kill what is left."""
    try:
        if process.exit_status() is None:
            process.send_signal(signal.SIGTERM)
            _wait(process, time.monotonic() + STOP_S, lambda: None)
    finally:
        process.close()


def _wait(process: ContenderProcess, deadline: float, report: Callable[[], None]) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(process.pidfd, selectors.EVENT_READ)
        while (left_s := deadline - time.monotonic()) > 0 and not selector.select(min(left_s, REPORT_S)):
            report()


def shown_s(seconds: float) -> str:
    """Return a duration as text."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _shown_path(path: Path, root: Path) -> str:
    return str(path.relative_to(root) if path.is_relative_to(root) else path)
