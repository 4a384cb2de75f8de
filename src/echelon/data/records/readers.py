"""Readers of record files: `Reader` in file order, `IndexedReader` by position or key.

Readers map their files into memory and return memoryviews of the mapping. Only a record that is stored in several parts
is copied. Any number of threads may read at once, and a view stays valid after its reader is closed. A file must not
shrink while it is mapped. Everything Echelon writes is renamed into place, so replacing a file in use is safe.

A reader's path may name several files, `a.rec;b.rec`, which are read as if they were one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from echelon.data.records import frame
from echelon.data.records.file import (
    Offsets,
    OnBad,
    PathLike,
    RecordError,
    RecordFile,
    report,
    scan_offsets,
    split_paths,
)
from echelon.data.records.index import check_belongs, index_path, read_index
from echelon.errors import DataError, UsageError


class Reader:
    """Reads records in file order; needs no index.

    With `on_bad`, a bad record is passed to it as a RecordError, and reading continues at the next record head.
    Payloads are then searched too, because a record head inside one means that its length is wrong, and it would hide
    other records.
    """

    def __init__(self, path: PathLike, on_bad: OnBad = None) -> None:
        self.files = [RecordFile(part) for part in split_paths(path)]
        self._on_bad = on_bad
        self._rest = iter(self)

    def __iter__(self) -> Iterator[memoryview]:
        """Yield all payloads from the beginning, independently of `read`."""
        return (payload for _, _, _, payload in self.located())

    def located(self) -> Iterator[tuple[RecordFile, int, int, memoryview]]:
        """Yield (file, record number in it, byte offset, payload) for all records."""
        for file in self.files:
            at: int | None = 0
            number = 0
            while at is not None and at < len(file.data):
                offset = at
                try:
                    payload, at = file.read(offset, number, strict=self._on_bad is not None)
                except RecordError as error:
                    report(error, self._on_bad)
                    at = frame.next_head(file.data, offset + 4)
                else:
                    yield file, number, offset, payload
                number += 1

    def read(self) -> memoryview | None:
        """Return the next payload, or None at the end."""
        return next(self._rest, None)

    def reset(self) -> None:
        """Make `read` start at the first record again."""
        self._rest = iter(self)

    def close(self) -> None:
        """Close the files."""
        for file in self.files:
            file.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class IndexedReader:
    """Reads records in any order: `reader[position]`, or `reader.read(key)` by the keys of the index.

    Any number of threads may share one.
    """

    def __init__(self, rec: PathLike, idx: PathLike | None = None) -> None:
        """Open record files with their indexes; `idx` defaults to the .idx beside each .rec."""
        recs = split_paths(rec)
        idxs = [index_path(part) for part in recs] if idx is None else split_paths(idx)
        if len(idxs) != len(recs):
            raise UsageError(f"{len(recs)} record files but {len(idxs)} index files: {rec} and {idx}")
        tables = [read_index(path, part) for path, part in zip(idxs, recs, strict=True)]
        keys, offsets = (np.concatenate(column) for column in zip(*tables, strict=True))
        self._open(recs, keys, offsets, np.cumsum([len(table[0]) for table in tables]).tolist())
        begin = 0
        for file, path, end in zip(self.files, idxs, self._ends, strict=True):
            check_belongs(path, file, self.offsets[begin:end])
            begin = end

    @classmethod
    def from_scan(cls, rec: PathLike) -> IndexedReader:
        """Open record files without an index: the keys are the positions 0, 1, 2 ... in file order."""
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
        self._ends = ends  # where each file's records end in keys and offsets
        self._positions: dict[int, int] | None = None

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
        """Return the position of a key in the index."""
        if self._positions is None:
            self._positions = self._number_keys()
        try:
            return self._positions[key]
        except KeyError:
            raise UsageError(f"unknown key {key}: {self._names()} has {len(self)} others, see `keys`") from None

    def _number_keys(self) -> dict[int, int]:
        positions = {key: position for position, key in enumerate(self.keys.tolist())}
        if len(positions) < len(self):
            values, counts = np.unique(self.keys, return_counts=True)
            raise DataError(
                f"the index of {self._names()} has key {values[counts > 1][0]} more than once; "
                "read by position, or create an index with new keys: echelon data rec2idx"
            )
        return positions

    def _names(self) -> str:
        return ";".join(str(file.path) for file in self.files)

    def close(self) -> None:
        """Close the files."""
        for file in self.files:
            file.close()

    def __enter__(self) -> IndexedReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle names and tables; another process maps the files itself."""
        return _reopen, ([file.path for file in self.files], self.keys, self.offsets, self._ends)


def _reopen(recs: list[Path], keys: Offsets, offsets: Offsets, ends: list[int]) -> IndexedReader:
    reader = IndexedReader.__new__(IndexedReader)
    reader._open(recs, keys, offsets, ends)
    return reader
