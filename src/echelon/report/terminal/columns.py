"""The columns of the table of workers, and which of them fit into a terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rich.cells import cell_len

from echelon.report.state.run import JobInfo, RunState
from echelon.report.state.worker import TRAINING, WorkerState, mean_and_max, sum_histograms

GAP = 2  # blanks between columns

Cell: TypeAlias = Callable[[WorkerState, RunState], str]


@dataclass(frozen=True, slots=True)
class Column:
    """A column. Of the columns that do not fit, the one with the highest `drop` goes first; `left` justifies it."""

    heading: str
    cell: Cell
    drop: int
    left: bool = False


@dataclass(frozen=True, slots=True)
class Cells:
    """The contents of a table: the columns, and one row of texts for each line."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]


def _phase(worker: WorkerState, state: RunState) -> str:
    phase = "" if worker.phase == TRAINING else worker.phase
    if not worker.restarts:
        return phase
    times = "restarted" if worker.restarts == 1 else f"restarted {worker.restarts} times"
    return f"{phase}, {times}" if phase else times


def _rate(worker: WorkerState, state: RunState) -> str:
    if worker.is_gone:
        return "–"
    return f"{worker.all_samples / _elapsed(worker, state) if worker.finished else worker.rate:.0f}"


def _waiting(worker: WorkerState, state: RunState) -> str:
    return f"{worker.wait_s / _elapsed(worker, state):.0%}"


def _elapsed(worker: WorkerState, state: RunState) -> float:
    return max(1e-9, worker.reported_at - (state.began or 0.0))


def _mean_max(histogram: dict[str, int]) -> str:
    mean, largest = mean_and_max(histogram)
    return f"{mean:.1f} ({largest})"


def metric(value: float | None) -> str:
    """Return a loss or an accuracy as text; empty before the first measurement."""
    if value is None or math.isfinite(value):
        return "" if value is None else f"{value:.4f}"
    return "nan"


_WORKER = Column("worker", lambda w, _: str(w.rank), 0)
_STATUS = Column("", _phase, 1, left=True)
_EPOCH = Column("epoch", lambda w, _: f"{w.epochs_done:.1f}", 2)
_RATE = Column("samples/s", _rate, 3)
_AHEAD = Column("rounds\nahead (max)", lambda w, _: _mean_max(w.rounds_ahead), 4)
_WAITING = Column("waiting", _waiting, 5)
_LOSS = Column("loss", lambda w, _: metric(w.loss), 6)
_ACCURACY = Column("accuracy", lambda w, _: metric(w.accuracy), 7)
_MISSED = Column("updates\nmissed (max)", lambda w, _: _mean_max(w.staleness), 8)
_SAMPLES = Column("samples", lambda w, _: str(w.all_samples), 9)
_STEPS = Column("steps", lambda w, _: str(w.all_steps), 10)
_WAITED = Column("seconds\nwaiting", lambda w, _: f"{w.wait_s:.1f}", 11)

_ALL = (_WORKER, _EPOCH, _STEPS, _SAMPLES, _RATE, _LOSS, _ACCURACY, _AHEAD, _MISSED, _WAITED, _WAITING, _STATUS)


def table_cells(
    state: RunState, info: JobInfo, width: int, max_rows: int | None = None, *, at_end: bool = False
) -> Cells:
    """Return the table of workers for a terminal of `width` columns.

    With `max_rows`, the workers that need attention have rows of their own, and one row has the means of the others.
    `at_end`: training metrics are left out, so that the only accuracy is that of the result.
    """
    hidden: set[Column] = set()
    if info.lock_step:
        hidden.add(_MISSED)
    if not info.bounded:
        hidden.add(_AHEAD)
    if info.num_workers == 1 and not info.num_servers:
        hidden |= {_WAITED, _WAITING}
    if at_end:
        hidden |= {_LOSS, _ACCURACY}
    restarted = any(worker.restarts for worker in state.workers.values())
    if (
        not restarted
        and len({worker.phase for worker in state.workers.values()} | ({TRAINING} if not at_end else set())) < 2
    ):
        hidden.add(_STATUS)
    columns = [column for column in _ALL if column not in hidden]
    shown, others = _split(state.ranked, max_rows)
    rows = [{column: column.cell(worker, state) for column in columns} for worker in shown]
    if others:
        mean = _mean_worker(others)
        rows.append({column: column.cell(mean, state) for column in columns} | {_WORKER: f"{len(others)} others"})
    while _table_width(columns, rows) > width and len(columns) > 1:
        columns.remove(max(columns, key=lambda column: column.drop))
    return Cells(tuple(columns), tuple(tuple(row[column] for column in columns) for row in rows))


def _table_width(columns: Sequence[Column], rows: Sequence[dict[Column, str]]) -> int:
    texts = [[*column.heading.split("\n"), *(row[column] for row in rows)] for column in columns]
    return sum(max(map(cell_len, lines)) for lines in texts) + GAP * (len(columns) - 1)


def _split(ranked: list[WorkerState], max_rows: int | None) -> tuple[list[WorkerState], list[WorkerState]]:
    """Return the workers with a row of their own, and the others: those that left and the slowest get a row."""
    if max_rows is None or len(ranked) <= max_rows:
        return ranked, []
    by_need = sorted(ranked, key=lambda worker: (not worker.is_gone, worker.epochs_done, worker.rank))
    own = {worker.rank for worker in by_need[: max(0, max_rows - 1)]}
    return [w for w in ranked if w.rank in own], [w for w in ranked if w.rank not in own]


def _mean_worker(workers: list[WorkerState]) -> WorkerState:
    """Return a worker whose values are the means of these, and whose histograms are their sums."""

    def mean(of: Callable[[WorkerState], float | None]) -> float | None:
        values = [value for value in map(of, workers) if value is not None]
        return sum(values) / len(values) if values else None

    def count(of: Callable[[WorkerState], float]) -> int:
        return round(mean(of) or 0)

    phases = {worker.phase for worker in workers}
    return WorkerState(
        rank=-1,
        phase=phases.pop() if len(phases) == 1 else TRAINING,
        clock=count(lambda w: w.clock),
        samples=count(lambda w: w.samples),
        wait_s=mean(lambda w: w.wait_s) or 0.0,
        staleness={str(k): n for k, n in sum_histograms(w.staleness for w in workers).items()},
        rounds_ahead={str(k): n for k, n in sum_histograms(w.rounds_ahead for w in workers).items()},
        reported_at=mean(lambda w: w.reported_at) or 0.0,
        rate=mean(lambda w: w.rate) or 0.0,
        batches_per_epoch=count(lambda w: w.batches_per_epoch),
        num_epochs=workers[0].num_epochs,
        first_step=count(lambda w: w.first_step),
        loss=mean(lambda w: w.loss),
        accuracy=mean(lambda w: w.accuracy),
    )
