"""The tables of weak and strong scaling: how the throughput of runs grows with the number of their devices.

Runs belong together if they differ only in the number of devices: in weak scaling with the same batch per device, in
strong scaling with the same batch of all devices together. Several runs with the same number count by their median.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from echelon.report.tables.record import RunRecord
from echelon.report.tables.scaling import Point, scaling
from echelon.report.tables.table import Cell, Column, Row, Section, Table

_Key = tuple[str, str, str, int]  # infrastructure, model, store and batch size


def weak_table(records: Sequence[RunRecord]) -> Table:
    """Return how runs with the same batch per device scale."""
    return _table("weak", "batch size / device", records, lambda one: one.batch_per_device)


def strong_table(records: Sequence[RunRecord]) -> Table:
    """Return how runs with the same batch of all devices together scale."""
    return _table("strong", "batch size", records, lambda one: one.total_batch)


def _table(name: str, batch: str, records: Sequence[RunRecord], batch_of: Callable[[RunRecord], int]) -> Table:
    columns = (
        Column("infrastructure"),
        Column("model"),
        Column("kvstore", "`{}`".format),
        Column(batch),
        Column("devices"),
        Column("runs"),
        Column("samples/s", "{:.1f}".format),
        Column("speedup", "{:.2f}".format),
        Column("efficiency", "{:.1f}%".format),
    )
    groups: dict[_Key, list[RunRecord]] = {}
    for record in records:
        groups.setdefault((record.infrastructure, record.model, record.kvstore, batch_of(record)), []).append(record)
    several = {key: group for key, group in groups.items() if len({one.num_devices for one in group}) > 1}
    rows = tuple(row for key, group in several.items() for row in _rows(key, group, is_weak=name == "weak"))
    return Table(name, f"{name.capitalize()} scaling", columns, (Section(rows),))


def _rows(key: _Key, group: Sequence[RunRecord], *, is_weak: bool) -> list[Row]:
    """Return one row per number of devices. A run that did not end as planned has a row of its own, without figures."""
    good = [one for one in group if not one.status and one.throughput]
    numbers = sorted({one.num_devices for one in good})
    alike = [[one for one in good if one.num_devices == number] for number in numbers]
    points = [_point(runs) for runs in alike]
    rows: list[tuple[int, Row]] = []
    for point, runs, scaled in zip(points, alike, scaling(points, weak=is_weak), strict=True):
        figures: tuple[Cell, ...] = (len(runs), point.samples_per_s, scaled.speedup, scaled.efficiency_percent)
        rows.append((point.count, Row((*key, point.count, *figures))))
    for one in group:
        if one not in good:
            status = one.status or "no speed was recorded"
            rows.append((one.num_devices, Row((*key, one.num_devices, 1, None, None, None), status)))
    return [row for _, row in sorted(rows, key=lambda pair: pair[0])]


def _point(runs: Sequence[RunRecord]) -> Point:
    samples_per_s = statistics.median(one.throughput for one in runs if one.throughput)
    return Point(runs[0].num_devices, 1000 * runs[0].total_batch / samples_per_s, samples_per_s)
