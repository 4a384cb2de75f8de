"""The time to an accuracy: the median over runs that differ only in their seed, and the spread.

A run that never had the accuracy counts as one that takes longer than all others.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from echelon.errors import UsageError
from echelon.report.tables.record import RunRecord
from echelon.report.tables.table import Column, Row, Section, Table

_COLUMNS = (
    Column("infrastructure"),
    Column("model"),
    Column("data"),
    Column("workers"),
    Column("batch size"),
    Column("learning rate", "{:g}".format),
    Column("kvstore", "`{}`".format),
    Column("runs"),
    Column("reached"),
    Column("median (s)", lambda seconds: f"{seconds:.1f}" if math.isfinite(seconds) else "not reached"),
    Column("spread (s)"),
)


def target_of(records: Sequence[RunRecord], given: float | None) -> float | None:
    """Return the accuracy to reach: the one that is given, or the target of the runs, if they had the same."""
    if given is not None:
        if not 0 < given <= 1:
            raise UsageError(f"--target must be above 0 and at most 1, not {given:g}")
        return given
    targets = {record.target_accuracy for record in records if record.target_accuracy is not None}
    return targets.pop() if len(targets) == 1 else None


def time_table(records: Sequence[RunRecord], target: float) -> Table:
    """Return one row per setting, whose runs differ in their seeds."""
    groups: dict[tuple[str | int | float | None, ...], list[RunRecord]] = {}
    for record in records:
        if record.curve:
            setting = (record.infrastructure, record.model, record.data, record.num_workers, record.batch_size)
            groups.setdefault((*setting, record.lr, record.kvstore), []).append(record)
    rows = tuple(Row((*key, *_figures(group, target)), _status(group)) for key, group in groups.items())
    title = f"Time to a validation accuracy of {target:g}"
    return Table("time-to-accuracy", title, _COLUMNS, (Section(rows, common={"target": target}),))


def _figures(group: Sequence[RunRecord], target: float) -> tuple[int, int, float, str | None]:
    times = sorted(math.inf if (seconds := one.seconds_to(target)) is None else seconds for one in group)
    reached = [seconds for seconds in times if math.isfinite(seconds)]
    spread = f"{reached[0]:.1f} – {reached[-1]:.1f}" if len(reached) > 1 else None
    return len(times), len(reached), statistics.median(times), spread


def _status(group: Sequence[RunRecord]) -> str:
    """Return why runs of the group did not end as planned."""
    return "; ".join(f"{one.name}: {one.status}" for one in group if one.status)
