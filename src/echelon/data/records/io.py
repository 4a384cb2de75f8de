"""RecordIO files: read and write records one after another or, with an index, in any order.

This is the module to import; the container's bytes are in `recordframe`, a mapped file in `recordfile`, random access
in `recordindex`, an image's header in `imagerecord`.

Readers map their files and hand out memoryviews into the map: nothing is copied but the rare split record, any number
of threads may read at once, and a view stays good after its reader is closed. A file must not shrink while it is
mapped; everything Echelon writes is renamed into place, so replacing a file in use is safe.

Where a reader asks for a path, `a.rec;b.rec` names several files, read as if they were one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from echelon.atomic_file import AtomicFile
from echelon.data.records import frame as recordframe
from echelon.data.records.file import (
    Offsets,
    PathLike,
    RecordError,
    RecordFile,
    index_path,
    scan_offsets,
    split_paths,
)
from echelon.data.records.frame import Bytes
from echelon.data.records.image_header import Header, pack, unpack
from echelon.data.records.index import IndexedReader, index_files, read_index
from echelon.errors import UsageError

__all__ = [
    "Header",
    "IndexedReader",
    "IndexedWriter",
    "Offsets",
    "Reader",
    "RecordError",
    "RecordFile",
    "Writer",
    "index_files",
    "index_path",
    "pack",
    "read_index",
    "scan_offsets",
    "split_paths",
    "unpack",
]


class Reader:
    """Read records in file order; no index needed.

    With `on_bad`, a bad record is handed to it as a RecordError and reading goes on at the next record head. Payloads
    are looked through, too, then: a record head inside one means that its length is wrong, and would swallow records.
    """

    def __init__(self, path: PathLike, on_bad: Callable[[RecordError], None] | None = None) -> None:
        self.files = [RecordFile(part) for part in split_paths(path)]
        self._on_bad = on_bad
        self._rest = iter(self)

    def __iter__(self) -> Iterator[memoryview]:
        """Yield all payloads from the beginning, wherever `read` stands."""
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
                    if self._on_bad is None:
                        raise
                    self._on_bad(error)
                    at = recordframe.next_head(file.data, offset + 4)
                else:
                    yield file, number, offset, payload
                number += 1

    def read(self) -> memoryview | None:
        """Return the next payload, or None at the end."""
        return next(self._rest, None)

    def reset(self) -> None:
        """Let `read` begin again."""
        self._rest = iter(self)

    def close(self) -> None:
        """Let the files go."""
        for file in self.files:
            file.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Writer:
    """Write records one after another. The file takes its name at `close`; an error inside `with` leaves none."""

    def __init__(self, path: PathLike) -> None:
        self._file = AtomicFile(path)
        self.path = self._file.path
        self._offset = 0

    def write(self, payload: Bytes) -> int:
        """Append one record; return the byte offset of its head."""
        frame = recordframe.encode(payload)
        self._file.stream.write(frame)
        offset, self._offset = self._offset, self._offset + len(frame)
        return offset

    def tell(self) -> int:
        """Return the byte offset the next record will have."""
        return self._offset

    def sync(self) -> None:
        """Have all records on the disk."""
        self._file.sync()

    def close(self) -> None:
        """Give the file its name."""
        self._file.commit()

    def discard(self) -> None:
        """Leave no file."""
        self._file.discard()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


class IndexedWriter:
    """Write records with keys: a .rec and its .idx, which appear together or not at all."""

    def __init__(self, rec: PathLike, idx: PathLike | None = None) -> None:
        """Begin both files; without `idx` it is the .rec's name with the suffix .idx."""
        self._writer = Writer(rec)
        self.path = self._writer.path
        try:
            self._index = AtomicFile(index_path(rec) if idx is None else idx)
            if self._index.path == self.path:
                self._index.discard()
                raise UsageError(f"records and index cannot both be {self.path}; give the index another name")
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
        """Give both files their names; where that fails, the old ones stay."""
        try:
            self._writer.sync()
            self._index.sync()
            # An old index must never stand beside new records: without one the file is still readable.
            self.index_path.unlink(missing_ok=True)
            self._writer.close()
            self._index.commit()
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Leave neither file."""
        self._writer.discard()
        self._index.discard()

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()
