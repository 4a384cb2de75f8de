"""The tables by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from echelon.errors import UsageError
from echelon.report.tables.published import accuracy_table, performance_table, throughput_table
from echelon.report.tables.record import RunRecord
from echelon.report.tables.scaled import strong_table, weak_table
from echelon.report.tables.table import Table
from echelon.report.tables.target import target_of, time_table

TARGET = "time-to-accuracy"
_TABLES: dict[str, Callable[[Sequence[RunRecord]], Table]] = {
    "performance": performance_table,
    "accuracy": accuracy_table,
    "throughput": throughput_table,
    "weak": weak_table,
    "strong": strong_table,
}
NAMES = (*_TABLES, TARGET)


def make_tables(
    records: Sequence[RunRecord], names: Sequence[str] = (), target: float | None = None, every: int | None = None
) -> list[Table]:
    """Return the tables of these names; without names, all that have rows. Raises if a named one has none."""
    if every is not None and every < 1:
        raise UsageError(f"--every must be 1 or more, not {every}")
    every_name = NAMES if target is None else (TARGET, *_TABLES)  # first what the user asks about
    found = [_make(name, records, target_of(records, target), every) for name in names or every_name]
    tables = [table for table in found if table is not None]
    if not names:
        return [table for table in tables if not table.is_empty]
    if TARGET in names and None in found:
        raise UsageError(
            "--table time-to-accuracy needs --target, because the runs have no target accuracy, or different ones"
        )
    for table in tables:
        if table.is_empty:
            raise UsageError(f"--table {table.name}: {_WHY_EMPTY[table.name]}")
    return tables


def _make(name: str, records: Sequence[RunRecord], target: float | None, every: int | None) -> Table | None:
    if name == TARGET:
        return None if target is None else time_table(records, target)
    return accuracy_table(records, every) if name == "accuracy" else _TABLES[name](records)


_WHY_EMPTY = {
    "performance": "no run has completed an epoch",
    "throughput": "there is no run",
    "accuracy": "no run has completed an epoch",
    "weak": "no two runs have the same model, store and batch size per device, but different numbers of devices",
    "strong": "no two runs have the same model, store and batch size, but different numbers of devices",
    TARGET: "no run has a validation",
}
