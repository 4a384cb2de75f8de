"""Writers of record files: `Writer` for a .rec, `IndexedWriter` for a .rec and its .idx, `make_index` for an .idx.

A file appears under its name only when it is complete.
"""

from __future__ import annotations

from pathlib import Path

from echelon.atomic_file import AtomicFile, check_writable
from echelon.data.records import frame
from echelon.data.records.file import OnBad, PathLike, index_path, split_paths
from echelon.data.records.frame import MAGIC_BYTES, Bytes
from echelon.data.records.readers import IndexedReader
from echelon.errors import UsageError


class Writer:
    """Writes records one after another. `close` gives the file its name; an error inside `with` leaves no file."""

    def __init__(self, path: PathLike) -> None:
        self._file = AtomicFile(path)
        self.path = self._file.path
        self._offset = 0

    def write(self, payload: Bytes) -> int:
        """Append one record; return the byte offset of its head."""
        encoded = frame.encode(payload)
        self._file.stream.write(encoded)
        offset, self._offset = self._offset, self._offset + len(encoded)
        return offset

    def tell(self) -> int:
        """Return the byte offset the next record will have."""
        return self._offset

    def sync(self) -> None:
        """Flush all records to the disk."""
        self._file.sync()

    def close(self) -> None:
        """Complete the file and give it its name."""
        self._file.commit()

    def discard(self) -> None:
        """Remove what was written."""
        self._file.discard()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


class IndexedWriter:
    """Writes records with keys to a .rec and its .idx, which appear together or not at all."""

    def __init__(self, rec: PathLike, idx: PathLike | None = None) -> None:
        """Create both files; `idx` defaults to the .rec's name with the suffix .idx."""
        self._writer = Writer(rec)
        self.path = self._writer.path
        try:
            self._index = AtomicFile(index_path(rec) if idx is None else idx)
            if self._index.path == self.path:
                self._index.discard()
                raise UsageError(f"records and index cannot be the same file {self.path}; give the index another name")
        except BaseException:
            self._writer.discard()
            raise
        self.index_path = self._index.path

    def write(self, key: int, payload: Bytes) -> int:
        """Append one record under `key`; return the byte offset of its head."""
        offset = self._writer.write(payload)
        self._index.stream.write(b"%d\t%d\n" % (key, offset))
        return offset

    def tell(self) -> int:
        """Return the byte offset the next record will have."""
        return self._writer.tell()

    def close(self) -> None:
        """Complete both files and give them their names; if that fails, the old files stay."""
        try:
            self._writer.sync()
            self._index.sync()
            # Remove the old index first: it must never be beside new records, which are readable without one.
            self.index_path.unlink(missing_ok=True)
            self._writer.close()
            self._index.commit()
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Remove what was written of both files."""
        self._writer.discard()
        self._index.discard()

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


def make_index(rec: Path, idx: Path, on_bad: OnBad = None) -> int:
    """Write the index of a record file with the keys 0, 1, 2 ...; return the number of records."""
    _check_index_name(rec, idx)
    check_writable(idx)
    with IndexedReader.from_files([rec], [None], on_bad) as reader:
        offsets = reader.offsets.tolist()
    with AtomicFile(idx) as file:
        file.stream.writelines(b"%d\t%d\n" % pair for pair in enumerate(offsets))
    return len(offsets)


def _check_index_name(rec: Path, idx: Path) -> None:
    """Refuse to overwrite records with an index, which `rec2idx *.rec` would do."""
    if len(split_paths(rec)) > 1:
        raise UsageError(f"{rec} names several record files, but an index is for one: run rec2idx for each")
    if not idx.is_file():
        return
    with idx.open("rb") as stream:
        is_records = stream.read(len(MAGIC_BYTES)) == MAGIC_BYTES
    if is_records or (rec.exists() and idx.samefile(rec)):
        instead = index_path(rec)
        raise UsageError(f"cannot write the index of {rec} to {idx}: that is a record file; use for example {instead}")
