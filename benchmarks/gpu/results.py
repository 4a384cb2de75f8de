"""The result files of `python -m benchmarks.gpu`: JSON with one record per row.

Every record contains its own command, commit, GPU, torch version and data, because several runs may contribute to one
file. The file is written after each row, so a run that is killed loses only the rows that were running.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Sequence
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
    """What all records of one run have in common. `extra` are flags added to every command.

    `sharing` says how processes shared the GPU: with MPS (`mps`), or in time slices and why.
    """

    commit: str
    gpu: str
    torch: str
    data: str
    extra: str = ""
    sharing: str = ""


@dataclass(frozen=True, slots=True)
class Record:
    """One finished row. Its figures are valid if `error` is empty; epochs are numbered from 0."""

    name: str
    kind: str
    command: str
    date: str
    origin: Origin
    jobs: int  # the number of rows that could run at the same time, including this one
    wall_s: float
    error: str = ""
    engine: str = ""
    precision: str = ""
    compile_s: float | None = None
    speeds: list[float] = field(default_factory=list)
    train_accuracy: dict[int, float] = field(default_factory=dict)
    validation_accuracy: dict[int, float] = field(default_factory=dict)
    epoch_s: dict[int, float] = field(default_factory=dict)
    curve: list[tuple[float, float]] = field(default_factory=list)  # seconds and accuracy of validations

    @property
    def speed(self) -> Speed | None:
        """The statistics of its speed lines."""
        return speed_of(self.speeds)

    def seconds_to(self, accuracy: float) -> float | None:
        """Return the seconds until a validation accuracy was reached; None if it was not."""
        return next((seconds for seconds, reached in self.curve if reached >= accuracy), None)


def missing_figures(row: Row, log: Log, curve: Sequence[tuple[float, float]] = ()) -> str:
    """Return which figures the log and the curve lack; empty if none."""
    if row.to_accuracy is not None and not any(accuracy >= row.to_accuracy for _, accuracy in curve):
        best = max((accuracy for _, accuracy in curve), default=0.0)
        return f"the accuracy {row.to_accuracy:g} was not reached; the best of {len(curve)} validations is {best:.4f}"
    if row.kind == "speed" and not log.speeds:
        return "the log has no speed line"
    epochs = [bar.epochs for bar in row.bars if bar.epochs - 1 not in log.validation]
    return f"the log has no validation after epoch {', '.join(map(str, epochs))}" if epochs else ""


class _File(msgspec.Struct):
    rows: list[Record]


def read_records(path: Path) -> dict[str, Record]:
    """Return the records of one file by name; none if the file does not exist."""
    if not path.exists():
        return {}
    try:
        body = msgspec.json.decode(path.read_bytes(), type=_File)
    except msgspec.DecodeError as error:
        raise DataError(f"{path} is not a result of `python -m benchmarks.gpu`: {error}; move it away") from error
    return {record.name: record for record in body.rows}


def read_folder(folder: Path) -> dict[str, Record]:
    """Return the records of all gpu*.json of a folder; of several for one row, the newest with valid figures."""
    found: dict[str, Record] = {}
    for path in sorted(folder.glob("gpu*.json")):
        for record in read_records(path).values():
            found[record.name] = better(found.get(record.name), record)
    return found


def better(old: Record | None, new: Record) -> Record:
    """Return which of two records of a row to keep: one with figures before a failed one, then the newer one."""
    if old is None or (old.error and not new.error):
        return new
    if new.error and not old.error:
        return old
    return new if new.date >= old.date else old


def write_records(path: Path, records: Iterable[Record], command: str) -> None:
    """Write all records to a file, replacing it."""
    write_result(path, {"rows": [asdict(record) for record in records]}, command)


@cache
def describe_gpu() -> tuple[str, str]:
    """Return the GPU's name and the torch version. A child process asks, so that this one allocates no GPU memory."""
    done = subprocess.run([sys.executable, "-c", _DESCRIBE], capture_output=True, text=True, check=True, timeout=120)
    gpu, torch_version = done.stdout.splitlines()[-2:]
    return gpu, torch_version
