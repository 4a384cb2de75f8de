"""What `python -m benchmarks.gpu` writes down: a record a row, in JSON files that grow row by row.

Every record says by itself what it is a measurement of (command, commit, GPU, torch, data), because a file may be
filled in several goes. A file is written whole after each row, so a run that is killed loses only what was running.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

import msgspec

from benchmarks.gpu.log import Log, Speed, speed_of
from benchmarks.gpu.rows import Row
from echelon.bench.harness.results import write_result
from echelon.errors import DataError

_DESCRIBE = (
    "import torch; on = torch.cuda.is_available();"
    "print(torch.cuda.get_device_name(0) if on else 'none (CPU)', torch.__version__, sep='\\n')"
)


@dataclass(frozen=True, slots=True)
class Origin:
    """What all rows of one go have in common. `extra` are flags added to every command."""

    commit: str
    gpu: str
    torch: str
    data: str
    extra: str = ""


@dataclass(frozen=True, slots=True)
class Record:
    """One finished row. `error` is empty exactly when its figures count; epochs are numbered from 0."""

    name: str
    kind: str
    command: str
    date: str
    origin: Origin
    jobs: int  # rows that were allowed to run at the same time, this one included
    wall_s: float
    error: str = ""
    engine: str = ""
    precision: str = ""
    compile_s: float | None = None
    speeds: list[float] = field(default_factory=list)
    train_accuracy: dict[int, float] = field(default_factory=dict)
    validation_accuracy: dict[int, float] = field(default_factory=dict)
    epoch_s: dict[int, float] = field(default_factory=dict)

    @property
    def speed(self) -> Speed | None:
        """Its speed lines as one figure."""
        return speed_of(self.speeds)

    def accuracy_after(self, epochs: int) -> float | None:
        """Of the validation after so many epochs."""
        return self.validation_accuracy.get(epochs - 1)

    def best_within(self, epochs: int) -> float | None:
        """The best validation of so many epochs."""
        return max((value for epoch, value in self.validation_accuracy.items() if epoch < epochs), default=None)


def make_record(
    row: Row, log: Log, *, command: str, date: str, origin: Origin, jobs: int, wall_s: float, error: str
) -> Record:
    """A row's figures from its log. A run that ended well without them is an error, too."""
    return Record(
        name=row.name,
        kind=row.kind,
        command=command,
        date=date,
        origin=origin,
        jobs=jobs,
        wall_s=round(wall_s, 2),
        error=error or lacking(row, log),
        engine=log.engine,
        precision=log.precision,
        compile_s=log.compile_s,
        speeds=log.speeds,
        train_accuracy=log.train,
        validation_accuracy=log.validation,
        epoch_s=log.epoch_s,
    )


def lacking(row: Row, log: Log) -> str:
    """What the log should have and has not; empty if nothing."""
    if row.kind == "speed" and not log.speeds:
        return "the log has no speed line"
    epochs = [bar.epochs for bar in row.bars if bar.epochs - 1 not in log.validation]
    return f"the log has no validation after epoch {', '.join(map(str, epochs))}" if epochs else ""


class _File(msgspec.Struct):
    rows: list[Record]


def read_records(path: Path) -> dict[str, Record]:
    """The records of one file by name; none if there is no file."""
    if not path.exists():
        return {}
    try:
        body = msgspec.json.decode(path.read_bytes(), type=_File)
    except msgspec.DecodeError as error:
        raise DataError(f"{path} is not a result of `python -m benchmarks.gpu`: {error}; move it away") from error
    return {record.name: record for record in body.rows}


def read_folder(folder: Path) -> dict[str, Record]:
    """The records of all gpu*.json of a folder; of several of one row, the newest whose figures count."""
    found: dict[str, Record] = {}
    for path in sorted(folder.glob("gpu*.json")):
        for record in read_records(path).values():
            found[record.name] = better(found.get(record.name), record)
    return found


def better(old: Record | None, new: Record) -> Record:
    """Which of two records of a row to keep: figures before failures, then the newer one."""
    if old is None or (old.error and not new.error):
        return new
    if new.error and not old.error:
        return old
    return new if new.date >= old.date else old


def write_records(path: Path, records: Iterable[Record], command: str) -> None:
    """Write the whole file anew."""
    write_result(path, {"rows": [asdict(record) for record in records]}, command)


@cache
def describe_gpu() -> tuple[str, str]:
    """The GPU's name and torch's version, asked in a process of its own: this one must not hold memory of the GPU."""
    done = subprocess.run([sys.executable, "-c", _DESCRIBE], capture_output=True, text=True, check=True, timeout=120)
    gpu, torch_version = done.stdout.splitlines()[-2:]
    return gpu, torch_version
