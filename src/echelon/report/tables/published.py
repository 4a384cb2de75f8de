"""The tables of MXNet's first distributed examples (2015) and of a comparison of GPUs (2017), in their own columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from echelon.report.tables.record import RunRecord
from echelon.report.tables.table import Cell, Column, Row, Section, Shown, Table, Value

_LONG_RUN = 20  # epochs; longer runs show every tenth one
_EVERY = 10


def performance_table(records: Sequence[RunRecord]) -> Table:
    """Return the epoch times by cluster, number of GPUs, batch size and store. A repeated cluster is shown as `-`."""
    columns = (
        Column("cluster"),
        Column("# machines"),
        Column("# GPUs"),
        Column("batch size / GPU"),
        Column("kvstore", lambda store: f"`{store.partition(' ')[0]}` {store.partition(' ')[2]}".rstrip()),
        Column("epoch time (sec)", "{:.1f}".format),
    )
    sections = []
    measured = [one for one in records if one.epoch_s is not None or one.status]
    for task, group in _grouped(measured, _task).items():
        rows, previous = [], None
        for record in group:
            cluster = Shown(record.infrastructure, "-") if record.infrastructure == previous else record.infrastructure
            previous = record.infrastructure
            cells = (cluster, machines(record), gpus(record), record.batch_per_device, record.kvstore, record.epoch_s)
            rows.append(Row(cells, record.status, {"workers": record.num_workers, "run": record.name}))
        sections.append(Section(tuple(rows), f"#### {task}", {"model": group[0].model, "data": group[0].data}))
    return Table("performance", "System performance", columns, tuple(sections))


def accuracy_table(records: Sequence[RunRecord], every: int | None = None) -> Table:
    """Return training and validation accuracy by epoch: one section per run, under its batch size and learning rate."""
    columns = (
        Column("epoch"),
        Column("train accuracy", "{:.6f}".format),
        Column("valid accuracy", "{:.6f}".format),
    )
    sections = []
    for heading, group in _grouped([one for one in records if one.epochs], _heading).items():
        for index, record in enumerate(group):
            common: dict[str, Value] = {"run": record.name, "model": record.model, "kvstore": record.kvstore}
            common |= {"batch_size": record.batch_size, "learning_rate": record.lr, "run_status": record.status or "ok"}
            text = _setting(record)
            sections.append(Section(_epochs(record, every), text if index else f"#### {heading}\n\n{text}", common))
    return Table("accuracy", "Accuracy by epoch", columns, tuple(sections))


def throughput_table(records: Sequence[RunRecord]) -> Table:
    """Return accuracy, epochs, seconds per epoch and samples per second, with the utilisation in parentheses."""
    columns = (
        Column("infrastructure"),
        Column("model"),
        Column("batch size"),
        Column("gpus"),
        Column("Accuracy (validation)", "{:.3f}".format),
        Column("Epochs"),
        Column("Training time (s/epoch)", "{:.1f}".format),
        Column("Throughput (samples/s)", "{:.0f}".format),
    )
    rows = tuple(Row(_throughput_cells(one), one.status, _settings(one)) for one in records)
    return Table("throughput", "Accuracy and throughput", columns, (Section(rows),))


def machines(record: RunRecord) -> Cell:
    """Return the number of machines, shown with that of the workers if it differs."""
    if record.num_workers == record.num_machines:
        return record.num_machines
    return Shown(record.num_machines, f"{record.num_machines} ({record.num_workers} workers)")


def gpus(record: RunRecord) -> Cell:
    """Return the number of GPUs, shown with that of the processes if they share GPUs. 0: the run used CPUs."""
    if record.num_gpus in (0, record.num_devices):
        return record.num_gpus
    return Shown(record.num_gpus, f"{record.num_gpus} ({record.num_devices} processes)")


def batch_text(record: RunRecord) -> str:
    """Return the batch as `128x8=1024 (lr=0.4)`; without a GPU it is one number."""
    lr = "" if record.lr is None else f" (lr={record.lr:g})"
    if record.num_devices > 1:
        return f"{record.batch_per_device}x{record.num_devices}={record.total_batch}{lr}"
    return f"{record.batch_size}x1{lr}" if record.num_gpus else f"{record.batch_size}{lr}"


def throughput(record: RunRecord) -> Cell:
    """Return the samples per second, shown as `6800 (8-80%)` if eight GPUs are busy 80 % of the time."""
    if record.throughput is None or record.utilisation is None:
        return record.throughput
    busy = f"{record.num_gpus}-{record.utilisation:.0%}" if record.num_gpus else f"{record.utilisation:.0%}"
    return Shown(record.throughput, f"{record.throughput:.0f} ({busy})")


def _throughput_cells(record: RunRecord) -> tuple[Cell, ...]:
    return (
        record.infrastructure,
        record.model,
        Shown(record.total_batch, batch_text(record)),
        gpus(record),
        record.accuracy,
        record.num_epochs or None,
        record.epoch_s,
        throughput(record),
    )


def _grouped(records: Sequence[RunRecord], name: Callable[[RunRecord], str]) -> dict[str, list[RunRecord]]:
    """Return the runs by name, in the order of the first run of each."""
    found: dict[str, list[RunRecord]] = {}
    for record in records:
        found.setdefault(name(record), []).append(record)
    return found


def _task(record: RunRecord) -> str:
    return " on ".join(filter(None, (record.model, record.data))) or "unknown network"


def _settings(record: RunRecord) -> dict[str, Value]:
    return {
        "kvstore": record.kvstore,
        "learning_rate": record.lr,
        "batch size / device": record.batch_per_device,
        "devices": record.num_devices,
        "utilisation": record.utilisation,
        "run": record.name,
    }


def _heading(record: RunRecord) -> str:
    """Return what ran where: `resnet50 on cifar10, 5 workers with 10 NVIDIA H200, BSP (`dist_sync`)`."""
    scheme = f", {record.scheme} (`{record.store}`{record.variant and f' {record.variant}'})" if record.scheme else ""
    if record.num_devices == 1:
        return f"{_task(record)}, single {record.infrastructure}{scheme}"
    workers = "1 worker" if record.num_workers == 1 else f"{record.num_workers} workers"
    devices = f"with {record.num_devices} processes on {record.num_gpus or ''}".rstrip()
    if record.num_gpus == record.num_devices:
        devices = f"with {record.num_gpus}"
    return f"{_task(record)}, {workers} {devices} {record.infrastructure}{scheme}"


def _setting(record: RunRecord) -> str:
    """Return the line above a table of accuracies, with the name of the run and, if it failed, its status."""
    lr = "" if record.lr is None else f", `learning_rate = {f'{record.lr:g}'.removeprefix('0')}`"
    status = f", {record.status}" if record.status else ""
    return f"- `batch_size = {record.batch_size}`{lr} (run {record.name}{status})"


def _epochs(record: RunRecord, every: int | None) -> tuple[Row, ...]:
    """Return every so many epochs, and the last one."""
    last = record.epochs[-1].epoch
    step = every or (_EVERY if last >= _LONG_RUN else 1)
    shown = [row for row in record.epochs if row.epoch % step == 0 or row.epoch == last]
    return tuple(Row((row.epoch, row.train_accuracy, row.valid_accuracy)) for row in shown)
