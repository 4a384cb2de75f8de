"""Tables of five workers with two devices each, in the format of the tables of 2015, and of the four schemes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.document import Cells, table, yes
from benchmarks.gpu.markdown import Records, has_figures
from benchmarks.gpu.published import CLUSTER_EPOCH_S, cluster_runs
from benchmarks.gpu.results import Record
from benchmarks.gpu.rows import TARGET, Row

PUBLISHED_FOR = "dist_sync"  # the cluster of 2015 ran BSP
NAMES = {"dist_sync": "BSP", "dist_async": "Async", "dist_ssync": "SSP, staleness 3", "dist_gsync": "GSP, two groups"}

INTRODUCTION = """\
The cluster of 2015 had five machines with two GTX 980 each. Here five workers with two devices each share one GPU: ten
processes on one machine (`--gpus 0,0`), with two servers. `batch_size` is that of a worker, half of it per device, so
the effective batch is five times as large, as on the cluster. A run is one command, and gives all four lines:
"""
TO_TARGET = """\
Four workers share one GPU, one of them threefold slower. Every step lasts at least as long as `--pace` says, on the
slow worker three times as long. Seconds are from the first step until a validation by rank 0, every half epoch of its
own, reaches the accuracy; the runs differ in their seeds.
"""


def cluster_tables(rows: Sequence[Row], records: Records) -> str:
    """Return the epoch times and, per scheme and setting, the accuracies beside the published ones."""
    ours = [row for row in rows if row.kind == "cluster" and has_figures(row, records)]
    if not ours:
        return ""
    parts = [
        "### Inception on CIFAR-10, five workers with two devices each",
        _with_command(INTRODUCTION, ours[0], records),
    ]
    parts.append(performance_table(ours, records))
    for store in dict.fromkeys(row.store for row in ours):
        parts.append(f"#### {NAMES[store]} (`{store}`)")
        parts += [accuracies(row, records[row.name]) for row in ours if row.store == store]
    parts.append(_count(ours, records))
    return "\n\n".join(part for part in parts if part)


def performance_table(rows: Sequence[Row], records: Records) -> str:
    """Return the table of epoch times, in the columns of 2015. Runs that differ in their learning rate are one line."""
    cells: list[Cells] = [
        ("GTX980", "5", "10", str(batch // 2), f"`{PUBLISHED_FOR}`", str(seconds), "1")
        for batch, seconds in CLUSTER_EPOCH_S.items()
    ]
    runs: dict[tuple[str, ...], list[float]] = {}
    for row in rows:
        record = records[row.name]
        batch = str(_setting(row)[0] // 2)
        line = (record.origin.gpu, "5 workers", "10 processes, 1 GPU", batch, f"`{row.store}`", str(record.jobs))
        runs.setdefault(line, []).extend(record.epoch_s.values())
    cells += [(*line[:-1], f"{statistics.median(seconds):.1f}", line[-1]) for line, seconds in runs.items() if seconds]
    heads = ("cluster", "# machines", "# GPUs", "batch size / GPU", "kvstore", "epoch time (sec)", "jobs at a time")
    return table(heads, "lllrlrr", cells)


def accuracies(row: Row, record: Record) -> str:
    """Return the accuracies of one run after the published numbers of epochs, in the format of 2015."""
    batch, lr = _setting(row)
    cells: list[Cells] = [
        (
            str(cell.epochs),
            f"{record.train_accuracy.get(cell.epochs - 1, float('nan')):.6f}",
            f"**{record.validation_accuracy[cell.epochs - 1]:.6f}**",
            f"{cell.train_accuracy:.6f}",
            f"{cell.accuracy:.6f}",
            yes(record.validation_accuracy[cell.epochs - 1] >= cell.accuracy),
        )
        for cell in cluster_runs()[batch, lr]
        if cell.epochs - 1 in record.validation_accuracy
    ]
    beside = "" if row.store == PUBLISHED_FOR else " for BSP"
    heads: Cells = (
        "epoch",
        "train accuracy",
        "valid accuracy",
        f"published train{beside}",
        f"published valid{beside}",
        "met" if row.store == PUBLISHED_FOR else "reaches BSP's",
    )
    rate = f"{lr:g}".lstrip("0")
    return f"- `batch_size = {batch}`, `learning_rate = {rate}`\n\n{table(heads, 'rrrrrl', cells)}"


def scheme_table(rows: Sequence[Row], records: Records) -> str:
    """Return the seconds to the target accuracy under the four schemes, as medians over the seeds that ran."""
    ours = [row for row in rows if row.kind == "schemes" and has_figures(row, records)]
    lock_step = _seconds(ours, PUBLISHED_FOR, records)
    cells: list[Cells] = []
    for store in dict.fromkeys(row.store for row in ours):
        seconds = _seconds(ours, store, records)
        median = statistics.median(seconds)
        ratio = f"{statistics.median(lock_step) / median:.2f}" if lock_step else ""
        each = ", ".join(f"{one:.1f}" for one in seconds)
        cells.append((f"`{store}`", NAMES[store], f"**{median:.1f}**", each, ratio))
    shown = table(("store", "scheme", "median s", "each run", "× BSP"), "llrrr", cells)
    if not shown:
        return ""
    introduction = _with_command(TO_TARGET, ours[0], records)
    return f"### CIFAR-10 to a validation accuracy of {TARGET:g}\n\n{introduction}\n\n{shown}"


def _with_command(text: str, row: Row, records: Records) -> str:
    """Return a text with the command of one of its rows."""
    return f"{text.strip()}\n\n`{records[row.name].command}`"


def _seconds(rows: Sequence[Row], store: str, records: Records) -> list[float]:
    """Return the seconds of a store's runs to the target."""
    found = (records[row.name].seconds_to(TARGET) for row in rows if row.store == store)
    return [seconds for seconds in found if seconds is not None]


def _setting(row: Row) -> tuple[int, float]:
    assert row.setting is not None  # every cluster row has one
    return row.setting


def _count(rows: Sequence[Row], records: Records) -> str:
    met = [
        records[row.name].validation_accuracy[bar.epochs - 1] >= bar.accuracy
        for row in rows
        if row.store == PUBLISHED_FOR
        for bar in row.bars
    ]
    return f"{sum(met)} of {len(met)} published accuracies of the cluster are reached." if met else ""
