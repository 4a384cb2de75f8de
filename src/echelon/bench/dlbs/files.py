"""The files of an experiment: its log, the status file of this machine's rank, and the folder of the run.

For `logs/a.log` they are `logs/a.log`, `logs/a.status.json` and `logs/a.run/`. The log of an experiment that has begun
says `running` until the experiment has ended, so that one that was interrupted is recognised.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from echelon.atomic_file import write_json
from echelon.bench.dlbs.configuration.experiment import Experiment
from echelon.bench.dlbs.records import read_records, record_line
from echelon.bench.dlbs.rerun import FAILURE, OK
from echelon.errors import UsageError
from echelon.observe.events import FILE_NAME


def beside_log(log_file: Path, suffix: str) -> Path:
    """Return the path of another file of the same experiment."""
    return log_file.with_name(log_file.name.removesuffix(".log") + suffix)


def read_log(path: Path) -> dict[str, Any] | None:
    """Return the records of a log, or None if there is none. Raises UsageError for a file that is not a log.

    An experiment overwrites its log, and must not overwrite any other file that `exp.log_file` names by mistake.
    """
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            found = read_records(file)
        if not found and path.stat().st_size:
            raise UsageError(f"exp.log_file: {path} exists and is not the log of an experiment; give another name")
        return found or None
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"the log {path} cannot be read: {error.strerror}") from error


def write_records(log: TextIO, records: Mapping[str, Any]) -> None:
    """Append records to a log."""
    for key, value in records.items():
        log.write(f"{record_line(key, value)}\n")


def write_status(experiment: Experiment, status: str, message: str = "", seconds: float | None = None) -> None:
    """Write the status file of this machine's rank."""
    body = {
        "status": status,
        "message": message,
        "rank": experiment.parameters.get("mxnet.rank", 0),
        "num_nodes": experiment.parameters.get("exp.num_nodes", 1),
        "pid": os.getpid(),
        "seconds": seconds,
        "time": time_now(),
    }
    write_json(beside_log(experiment.log_file, ".status.json"), body)


def prepared_folder(log_file: Path) -> Path:
    """Create the folder of the log, and an empty one for the run; returns the latter."""
    folder = beside_log(log_file, ".run")
    try:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        if (folder / FILE_NAME).exists():  # of an earlier run of this experiment
            shutil.rmtree(folder)
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise UsageError(f"exp.log_file: {error.filename} cannot be created: {error.strerror}") from error
    return folder.absolute()


def record_failure(experiment: Experiment, message: str) -> None:
    """Write the log and the status of an experiment that could not start, unless its log has a result."""
    log = read_log(experiment.log_file)
    if log is not None and log.get("exp.status") == OK:
        return
    experiment.log_file.parent.mkdir(parents=True, exist_ok=True)
    with experiment.log_file.open("w", encoding="utf-8") as file:
        write_records(file, {**experiment.parameters, "exp.status": FAILURE, "exp.status_msg": message})
    write_status(experiment, FAILURE, message)


def time_now() -> str:
    """Return the time in the format of DLBS."""
    now = datetime.now()
    return f"{now:%Y-%m-%d:%H:%M:%S}:{now.microsecond // 1000:03d}"
