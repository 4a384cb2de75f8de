"""Records of `python -m benchmarks.gpu` as Markdown tables: the target, the figure, and whether the target is met."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace

from benchmarks.document import Cells, table, yes
from benchmarks.gpu.cluster_tables import cluster_tables, scheme_table
from benchmarks.gpu.markdown import Records, has_figures
from benchmarks.gpu.results import Record
from benchmarks.gpu.rows import Bar, Row
from benchmarks.gpu.run import shown_command
from echelon.report.tables.published import throughput_table
from echelon.report.tables.results import record_of_command
from echelon.report.tables.table import as_markdown

BLOCK = "gpu"  # of the document


def markdown(rows: Sequence[Row], records: Records) -> str:
    """Return all tables, followed by the rows that failed or did not run."""
    ours = [records[row.name] for row in rows if row.name in records]
    parts = [origins(ours), speed_table(rows, records), accuracy_table(rows, records), table_of_2017(rows, records)]
    parts += [cluster_tables(rows, records), scheme_table(rows, records), gaps(rows, records)]
    return "\n\n".join(part for part in parts if part)


def origins(records: Sequence[Record]) -> str:
    """Return one line per distinct origin: GPU, torch version, commit and data."""
    lines = []
    for origin in dict.fromkeys(record.origin for record in records):
        count = sum(record.origin == origin for record in records)
        commit = re.sub(r"^([0-9a-f]{12})[0-9a-f]+", r"\1", origin.commit)
        extra = f"; added to every command: `{origin.extra}`" if origin.extra else ""
        extra += f"; processes share the GPU by {origin.sharing}" if origin.sharing else ""
        lines.append(
            f"- {count} row{'s' * (count != 1)}: {origin.gpu}, torch {origin.torch}, commit {commit}; "
            f"data: {origin.data}{extra}"
        )
    return "\n".join(lines)


def speed_table(rows: Sequence[Row], records: Records) -> str:
    """Return the table of speeds with their targets and the published figures."""
    cells = [_speed_cells(row, records) for row in rows if row.kind == "speed" and has_figures(row, records)]
    heads = ("command", "samples/s", "10th – 90th percentile", "lines", "target", "met", "published", "as")
    return table(heads, "lrrrrlrl", cells)


def _speed_cells(row: Row, records: Records) -> Cells:
    record = records[row.name]
    speed = record.speed
    assert speed is not None  # else the record has an error
    target, met = _target(row, records, speed.median)
    spread = f"{speed.p10:,.0f} – {speed.p90:,.0f}"
    how = "; ".join(text.partition(":")[0] for text in (record.precision, record.engine) if text)
    command = f"`{shown_command(row, record.origin.extra)}`"
    return command, f"**{speed.median:,.0f}**", spread, str(speed.lines), target, met, row.published, how


def _target(row: Row, records: Records, value: float) -> tuple[str, str]:
    """Return the target as shown, and whether the speed reaches it."""
    if row.target is None:
        return "", ""
    if row.against is None:
        return f"{row.target:,.0f}", yes(value >= row.target)
    other = records.get(row.against)
    if other is None or other.error or other.speed is None:
        return f"{row.target:.0%} of {row.against}", "not measured"
    share = value / other.speed.median
    return f"{row.target:.0%} of {row.against}", f"{yes(share >= row.target)} ({share:.1%})"


def accuracy_table(rows: Sequence[Row], records: Records) -> str:
    """Return the table of validation accuracies. The one after the last epoch is compared with the published one."""
    cells = [
        (row.name, str(bar.epochs), f"{bar.accuracy:g}", bar.source, *_reached(records[row.name], bar))
        for row in rows
        if row.kind == "accuracy" and has_figures(row, records)
        for bar in row.bars
    ]
    heads = ("row", "epochs", "published", "on", "after the last epoch", "met", "best epoch until then", "s/epoch")
    shown = table(heads, "lrrlrlrr", cells)
    met = sum(cell[5] == yes(True) for cell in cells)
    return f"{shown}\n\n{met} of {len(cells)} published accuracies are reached." if shown else ""


def _reached(record: Record, bar: Bar) -> tuple[str, str, str, str]:
    last = record.validation_accuracy[bar.epochs - 1]
    best = max(value for epoch, value in record.validation_accuracy.items() if epoch < bar.epochs)
    middle = f"{statistics.median_low(record.epoch_s.values()):.1f}" if record.epoch_s else ""
    return f"**{last:.4f}**", yes(last >= bar.accuracy), f"{best:.4f}", middle


def table_of_2017(rows: Sequence[Row], records: Records) -> str:
    """Return the runs on CIFAR-10 in the columns of the table that was published in 2017."""
    ours = [records[row.name] for row in rows if row.name.startswith("resnet") and has_figures(row, records)]
    if not ours:
        return ""
    runs = throughput_table([record_of_command(asdict(record)) for record in ours])
    return as_markdown([replace(runs, title="ResNets on CIFAR-10, in the columns of the table of 2017")])


def gaps(rows: Sequence[Row], records: Records) -> str:
    """Return which rows have no figures, and why."""
    found = [records[row.name] for row in rows if row.name in records]
    failed = [f"- {record.name} failed: {record.error}" for record in found if record.error]
    missing = [row.name for row in rows if row.name not in records]
    return "\n".join([*failed, *([f"- not run: {', '.join(missing)}"] if missing else [])])
