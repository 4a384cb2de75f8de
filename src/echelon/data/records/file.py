"""One RecordIO file, mapped into memory, and its index; errors say file, record and byte.

`frame` has the byte format; the readers have the order and the keys. An .idx file is text with one line per record:
key, tab, byte offset of the record's head.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from echelon.data.records import frame
from echelon.data.records.frame import MAGIC_BYTES, FrameError
from echelon.errors import DataError, UsageError

PathLike: TypeAlias = str | os.PathLike[str]
Offsets: TypeAlias = NDArray[np.int64]

_NUM_CHECKED = 16  # records that are looked up to recognise the index of another file


class RecordError(DataError):
    """A truncated or corrupt record. `offset` is the byte at which it begins; `record` is its number, from 0."""

    def __init__(self, path: PathLike, offset: int, record: int, reason: str) -> None:
        super().__init__(f"{os.fspath(path)}: record {record} at byte {offset}: {reason}")
        self.path = Path(path)
        self.offset = offset
        self.record = record
        self.reason = reason


OnBad: TypeAlias = Callable[[RecordError], None] | None
Fault = TypeVar("Fault", bound=DataError)


def report(fault: Fault, on_bad: Callable[[Fault], None] | None) -> None:
    """Pass an error to `on_bad`, or raise it if that is None."""
    if on_bad is None:
        raise fault
    on_bad(fault)


def split_paths(paths: PathLike) -> list[Path]:
    """Return the files of `a.rec;b.rec`."""
    files = [Path(part.strip()) for part in os.fspath(paths).split(";") if part.strip()]
    if not files:
        raise UsageError(f"expected a record file, or several joined by ';', got {os.fspath(paths)!r}")
    return files


class RecordFile:
    """A mapped file. It has no read position, so threads may share it."""

    def __init__(self, path: PathLike) -> None:
        self.path = Path(path)
        self._located = self.path.absolute()
        self._map = _map_file(self.path)
        self._identity = _identity(self._located)
        self.data = memoryview(self._map)

    def __reduce__(self) -> tuple[Callable[..., RecordFile], tuple[Path, Path, tuple[int, ...]]]:
        """Pickle the name; another process maps the file itself."""
        return _map_again, (self.path, self._located, self._identity)

    def read(self, offset: int, number: int, strict: bool = False) -> tuple[memoryview, int]:
        """Return the payload at `offset` and the next offset. `number` is the record's number, for errors."""
        try:
            payload, after = frame.decode(self.data, offset)
            if strict:
                frame.check_no_head_inside(self.data, offset, after)
        except FrameError as error:
            raise self.error(error, number) from None
        return payload, after

    def scan(self) -> Offsets:
        """Return the offsets of all records; reads only their heads, one to two million per second if cached."""
        offsets, fault = frame.scan(self.data)
        if fault is not None:
            raise self.error(fault, len(offsets))
        return np.array(offsets, np.int64)

    def error(self, fault: FrameError, number: int) -> RecordError:
        """Return a fault as a RecordError with the place in this file."""
        where = f" (in its part at byte {fault.part_offset})" if fault.part_offset != fault.offset else ""
        return RecordError(self.path, fault.offset, number, fault.reason + where)

    def close(self) -> None:
        """Close the file. Views of it keep the mapping alive until they are gone."""
        self.data.release()
        if isinstance(self._map, mmap.mmap):
            try:
                self._map.close()
            except BufferError:
                pass


def _map_again(path: Path, located: Path, identity: tuple[int, ...]) -> RecordFile:
    """Map a file that another process has mapped; `located` is its absolute path."""
    file = RecordFile(located)
    if file._identity != identity:
        raise DataError(f"{path} changed after it was opened; open it again")
    file.path = path
    return file


def _identity(path: Path) -> tuple[int, ...]:
    stat = os.stat(path)
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def _map_file(path: Path) -> mmap.mmap | bytes:
    if path.is_dir():
        raise UsageError(
            f"{path} is a folder; expected a record file. To pack a folder of images, use echelon data im2rec"
        )
    try:
        with open(path, "rb") as stream:
            if path.suffix == ".lst":
                raise UsageError(
                    f"{path} is a list of images, not a record file; pack it: echelon data im2rec {path} FOLDER "
                    f"(its paths are relative to FOLDER), and use {path.with_suffix('.rec')}"
                )
            if not os.fstat(stream.fileno()).st_size:  # An empty file has no records, but cannot be mapped.
                return b""
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise DataError(
            f"no record file {path} (searched {path.parent.absolute()}); "
            "create one: echelon data im2rec PREFIX FOLDER, or echelon data convert"
        ) from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


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
