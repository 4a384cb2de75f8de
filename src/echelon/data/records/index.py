"""Random access to RecordIO files: the .idx text, and a reader by key or position, with an index file or without.

Owns the order and keys of records. An .idx file is text, one line a record: key, tab, byte offset of its head.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from echelon.data.records.file import Offsets, PathLike, RecordFile, index_path, scan_offsets, split_paths
from echelon.data.records.frame import MAGIC_BYTES
from echelon.errors import DataError, UsageError

_LOOKED_AT = 16  # records, to tell another file's index


def read_index(path: PathLike, rec: PathLike | None = None) -> tuple[Offsets, Offsets]:
    """Return (keys, offsets) of an .idx file, the one of `rec`: lines of key, tab, byte offset."""
    try:
        text = Path(path).read_text()
    except FileNotFoundError:
        of = rec or Path(path).with_suffix(".rec")
        raise DataError(f"no index {path}; make it: echelon data rec2idx {of} {path}") from None
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
    return DataError(f"{path} is no index: expected lines of `key<TAB>byte offset`")


def index_files(recs: Sequence[Path], idx: PathLike | None) -> list[Path | None]:
    """Return an index for each record file: those that are named, `a.idx;b.idx`, or where there are some beside it."""
    if idx is None:
        beside = map(index_path, recs)
        return [path if path.is_file() else None for path in beside]
    named = split_paths(idx)
    if len(named) != len(recs):
        names = ";".join(map(str, recs))
        raise UsageError(f"{len(recs)} record files but {len(named)} index files: {names} and {os.fspath(idx)}")
    return list(named)


class IndexedReader:
    """Read records in any order: `reader[position]`, or `reader.read(key)` by the index's keys.

    Nothing changes after opening but a table of keys made at the first `read`, so any number of threads may share one.
    """

    def __init__(self, rec: PathLike, idx: PathLike | None = None) -> None:
        """Open with an index; without `idx` it is the file beside each .rec with the suffix .idx."""
        recs = split_paths(rec)
        idxs = [index_path(part) for part in recs] if idx is None else split_paths(idx)
        if len(idxs) != len(recs):
            raise UsageError(f"{len(recs)} record files but {len(idxs)} index files: {rec} and {idx}")
        tables = [read_index(path, part) for path, part in zip(idxs, recs, strict=True)]
        keys, offsets = (np.concatenate(column) for column in zip(*tables, strict=True))
        self._open(recs, keys, offsets, np.cumsum([len(table[0]) for table in tables]).tolist())
        self._check_belong(idxs)

    @classmethod
    def from_scan(cls, rec: PathLike) -> IndexedReader:
        """Open without an index file: keys are the positions 0, 1, 2 ... in file order."""
        recs = split_paths(rec)
        parts = [scan_offsets(path) for path in recs]
        offsets = np.concatenate(parts)
        reader = cls.__new__(cls)
        reader._open(recs, np.arange(len(offsets)), offsets, np.cumsum([len(part) for part in parts]).tolist())
        return reader

    def _open(self, recs: list[Path], keys: Offsets, offsets: Offsets, ends: list[int]) -> None:
        self.files = [RecordFile(path) for path in recs]
        self.keys = keys
        self.offsets = offsets
        self._ends = ends  # where in keys and offsets each file's records end
        self._positions: dict[int, int] | None = None

    def _check_belong(self, idxs: list[Path]) -> None:
        begin = 0
        for file, idx, end in zip(self.files, idxs, self._ends, strict=True):
            fault = _misfit(file, self.offsets[begin:end])
            if fault is not None:
                remedy = f"make it anew: echelon data rec2idx {file.path} {idx}"
                raise DataError(f"{idx} does not belong to {file.path}: {fault}; {remedy}")
            begin = end

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, position: int) -> memoryview:
        """Return the payload at a position of the index (0 ... len-1, in the order of the .idx file)."""
        if not 0 <= position < len(self.offsets):
            raise IndexError(f"position {position} of {len(self.offsets)} records")
        file = self.files[0] if len(self.files) == 1 else self.files[bisect_right(self._ends, position)]
        return file.read(int(self.offsets[position]), position)[0]

    def read(self, key: int) -> memoryview:
        """Return the payload with this key."""
        return self[self.position(key)]

    def position(self, key: int) -> int:
        """Return where in the index a key stands."""
        if self._positions is None:
            self._positions = self._number_keys()
        try:
            return self._positions[key]
        except KeyError:
            raise UsageError(f"no key {key} among the {len(self)} of {self._names()}; `keys` lists them") from None

    def _number_keys(self) -> dict[int, int]:
        positions = {key: position for position, key in enumerate(self.keys.tolist())}
        if len(positions) < len(self):
            values, counts = np.unique(self.keys, return_counts=True)
            raise DataError(
                f"the index of {self._names()} has key {values[counts > 1][0]} more than once; "
                "read by position, or number the records anew: echelon data rec2idx"
            )
        return positions

    def _names(self) -> str:
        return ";".join(str(file.path) for file in self.files)

    def close(self) -> None:
        """Let the files go."""
        for file in self.files:
            file.close()

    def __enter__(self) -> IndexedReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle as names and tables; another process maps the files itself."""
        return _reopen, ([file.path for file in self.files], self.keys, self.offsets, self._ends)


def _misfit(file: RecordFile, offsets: Offsets) -> str | None:
    """Say what speaks against an index: a place outside the file, or no records at most of a few that are looked at."""
    outside = offsets[(offsets < 0) | (offsets >= len(file.data))]
    if outside.size:
        return f"it has a record at byte {outside[0]}, the file has {len(file.data)} bytes"
    looked = offsets[np.linspace(0, len(offsets) - 1, min(_LOOKED_AT, len(offsets)), dtype=np.int64)].tolist()
    wrong = [offset for offset in looked if file.data[offset : offset + len(MAGIC_BYTES)] != MAGIC_BYTES]
    if 2 * len(wrong) > len(looked):  # fewer may be damaged records
        return f"at byte {wrong[0]}, where it has a record, none begins"
    return None


def _reopen(recs: list[Path], keys: Offsets, offsets: Offsets, ends: list[int]) -> IndexedReader:
    reader = IndexedReader.__new__(IndexedReader)
    reader._open(recs, keys, offsets, ends)
    return reader
