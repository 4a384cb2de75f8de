"""The result files of rows, as the tables need them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.compare.rows import Row
from echelon.errors import DataError

NOT_SHOWN = ("--json", "--plot")  # flags for files, which a reader of the results does not need


@dataclass(frozen=True, slots=True)
class Result:
    """One result file: where its figures come from, and the file's whole content."""

    row: Row
    command: str
    commit: str
    date: str
    machine: dict[str, Any]
    body: dict[str, Any]


class _Header(msgspec.Struct):
    command: str
    commit: str
    date: str
    machine: dict[str, Any]


def read_result(row: Row, folder: Path) -> Result | None:
    """Return the result of a row, or None if it has none."""
    path = folder / row.file
    if not path.exists():
        return None
    data = path.read_bytes()
    try:
        header = msgspec.json.decode(data, type=_Header)
    except msgspec.DecodeError as error:
        raise DataError(f"{path} is not a result of `{row.command}`: {error}; move it away") from error
    command = row.prefix + shown_command(header.command)
    return Result(row, command, header.commit, header.date, header.machine, msgspec.json.decode(data))


def read_results(rows: Sequence[Row], folder: Path) -> list[Result]:
    """Return the results of the rows that have one."""
    return [result for row in rows if (result := read_result(row, folder)) is not None]


def shown_command(command: str) -> str:
    """Return a command without the flags for its files."""
    words = shlex.split(command)
    for flag in NOT_SHOWN:
        while flag in words:
            at = words.index(flag)
            del words[at : at + 2]
    return shlex.join(words)


def short_commit(commit: str) -> str:
    """Return the first digits of a commit, and whether the code was changed since."""
    digits, dash, dirty = commit.partition("-")
    return f"{digits[:9]}{dash}{dirty}"
