"""Readers of record files: `Reader` in file order, `IndexedReader` by position or key.

Readers map their files into memory and return memoryviews of the mapping. Only a record that is stored in several parts
is copied. Any number of threads may read at once, and a view stays valid after its reader is closed. A file must not
shrink while it is mapped. Everything Echelon writes is renamed into place, so replacing a file in use is safe.

A reader's path may name several files, `a.rec;b.rec`, which are read as if they were one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from echelon.data.records import frame
from echelon.data.records.file import (
    Offsets,
    OnBad,
    PathLike,
    RecordError,
    RecordFile,
    check_belongs,
    index_files,
    index_path,
    read_index,
    report,
    split_paths,
)
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
        idxs = [index_path(one) for one in recs] if idx is None else index_files(recs, idx)
        self._keys: Offsets | None = np.concatenate(self._open(recs, idxs))

    @classmethod
    def from_scan(cls, rec: PathLike) -> IndexedReader:
        """Open record files without an index: the keys are the positions 0, 1, 2 ... in file order."""
        recs = split_paths(rec)
        return cls.from_files(recs, [None] * len(recs))

    @classmethod
    def from_files(cls, recs: Sequence[Path], idxs: Sequence[Path | None], on_bad: OnBad = None) -> IndexedReader:
        """Open record files, with or without an index, for reading by position; the keys are the positions.

        A file without an index is scanned; `on_bad` receives its damaged records.
        """
        reader = cls.__new__(cls)
        reader._open(recs, idxs, on_bad)
        reader._keys = None
        return reader

    def _open(self, recs: Sequence[Path], idxs: Sequence[Path | None], on_bad: OnBad = None) -> list[Offsets]:
        """Open the files; return the keys of each."""
        opened = [_open_file(rec, idx, on_bad) for rec, idx in zip(recs, idxs, strict=True)]
        self.files = [file for file, _, _ in opened]
        self.offsets = np.concatenate([offsets for _, _, offsets in opened])
        self._ends = np.cumsum([len(offsets) for _, _, offsets in opened]).tolist()  # of each file, in `offsets`
        self._positions: dict[int, int] | None = None
        return [keys for _, keys, _ in opened]

    @property
    def keys(self) -> Offsets:
        """The keys of all records, in the order of their positions."""
        return np.arange(len(self)) if self._keys is None else self._keys

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, position: int) -> memoryview:
        """Return the payload at a position of the index (0 ... len-1, in the order of the .idx file)."""
        if not 0 <= position < len(self.offsets):
            raise IndexError(f"position {position} of {len(self.offsets)} records")
        file, number, offset = self.locate(position)
        return file.read(offset, number)[0]

    def locate(self, position: int) -> tuple[RecordFile, int, int]:
        """Return (file, record number in it, byte offset) of a position."""
        index = bisect_right(self._ends, position)
        return self.files[index], position - (self._ends[index - 1] if index else 0), int(self.offsets[position])

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


def _open_file(rec: Path, idx: Path | None, on_bad: OnBad) -> tuple[RecordFile, Offsets, Offsets]:
    """Return a record file, and the keys and offsets of its records."""
    if idx is not None:
        keys, offsets = read_index(idx, rec)
        file = RecordFile(rec)
        check_belongs(idx, file, offsets)
        return file, keys, offsets
    file = RecordFile(rec)
    if on_bad is None:
        offsets = file.scan()
    else:
        offsets = np.array([offset for _, _, offset, _ in Reader(rec, on_bad).located()], np.int64)
    return file, np.arange(len(offsets)), offsets
