"""The .idx file of a record file: its name, its text, and whether it belongs to the record file.

An .idx file is text with one line per record: key, tab, byte offset of the record's head.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from echelon.data.records.file import Offsets, PathLike, RecordFile, split_paths
from echelon.data.records.frame import MAGIC_BYTES
from echelon.errors import DataError, UsageError

_NUM_CHECKED = 16  # records that are looked up to recognise the index of another file


def index_path(rec: PathLike) -> Path:
    """Return the usual name of a record file's index: the same name with the suffix .idx."""
    return Path(rec).with_suffix(".idx")


def index_files(recs: Sequence[Path], idx: PathLike | None) -> list[Path | None]:
    """Return the index of each record file.

    With `idx` (`a.idx;b.idx`) these are the named files; otherwise the .idx beside each record file, or None.
    """
    if idx is None:
        beside = map(index_path, recs)
        return [path if path.is_file() else None for path in beside]
    named = split_paths(idx)
    if len(named) != len(recs):
        names = ";".join(map(str, recs))
        raise UsageError(f"{len(recs)} record files but {len(named)} index files: {names} and {os.fspath(idx)}")
    return list(named)


def read_index(path: PathLike, rec: PathLike | None = None) -> tuple[Offsets, Offsets]:
    """Return (keys, offsets) of an .idx file. `rec` is its record file, for the error message."""
    try:
        text = Path(path).read_text()
    except FileNotFoundError:
        of = rec or Path(path).with_suffix(".rec")
        raise DataError(f"no index {path}; create it: echelon data rec2idx {of} {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read index {path}: {error}") from error
    fields = text.split()
    try:
        table = np.array(list(map(int, fields)), np.int64).reshape(-1, 2)
    except (ValueError, OverflowError):
        raise _index_error(path, text) from None
    return table[:, 0].copy(), table[:, 1].copy()


def _index_error(path: PathLike, text: str) -> DataError:
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.split()
        if fields and not (len(fields) == 2 and all(field.isdecimal() for field in fields)):
            return DataError(f"{path}, line {number}: expected `key<TAB>byte offset`, got {line!r}")
    return DataError(f"{path} is not an index: expected lines of `key<TAB>byte offset`")


def check_belongs(idx: PathLike, file: RecordFile, offsets: Offsets) -> None:
    """Raise DataError if an index cannot be that of a record file.

    That is so if an offset is outside the file, or if no records begin at most of the few offsets looked up.
    """
    fault = _find_mismatch(file, offsets)
    if fault is not None:
        remedy = f"create it again: echelon data rec2idx {file.path} {idx}"
        raise DataError(f"{idx} does not belong to {file.path}: {fault}; {remedy}")


def _find_mismatch(file: RecordFile, offsets: Offsets) -> str | None:
    outside = offsets[(offsets < 0) | (offsets >= len(file.data))]
    if outside.size:
        return f"it lists a record at byte {outside[0]}, but the file has {len(file.data)} bytes"
    checked = offsets[np.linspace(0, len(offsets) - 1, min(_NUM_CHECKED, len(offsets)), dtype=np.int64)].tolist()
    wrong = [offset for offset in checked if file.data[offset : offset + len(MAGIC_BYTES)] != MAGIC_BYTES]
    if 2 * len(wrong) > len(checked):  # fewer may be damaged records
        return f"it lists a record at byte {wrong[0]}, but none begins there"
    return None
