"""Sources of encoded samples: record files and folders of images, with one small interface.

A source gives random access by sample number, can be used by any number of threads, and tells where a sample is, for
error messages. The source of decoded images is in `memory`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from echelon.data.images.decode import Pixels
from echelon.data.records import IndexedReader, RecordError, unpack
from echelon.data.records.class_file import ClassNames, read_class_names
from echelon.data.records.file import OnBad, index_files, split_paths
from echelon.data.records.frame import Bytes
from echelon.errors import DataError, UsageError

_MOST_CLASSES = 1 << 24  # labels are float32, which represents every integer up to this one
MANY = 1000  # from this number of images on, decode processes are worth their start-up time
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif")


class Sample(NamedTuple):
    """One image, encoded or as pixels, and its label or labels."""

    payload: Bytes | Pixels
    label: float | NDArray[np.float32]


class Source(Protocol):
    """Random access to images. Threads may share one."""

    def __len__(self) -> int: ...

    def read(self, number: int) -> Sample:
        """Return a sample; raise a DataError that says where it is if it cannot be read."""

    def where(self, number: int) -> str:
        """Return where a sample is: file, record, byte."""


def class_number(label: float | NDArray[np.float32]) -> int:
    """Return a sample's class; raise DataError for several labels, or a label that is not a class number."""
    if isinstance(label, np.ndarray):
        raise DataError(f"it has {label.size} labels, expected one class number")
    if not label.is_integer() or abs(label) > _MOST_CLASSES:
        raise DataError(f"its label {label:g} is not a class number")
    return int(label)


def _check_class(label: float | NDArray[np.float32], num_classes: int) -> None:
    if not 0 <= class_number(label) < num_classes:
        raise DataError(f"its label is {label:g}, but --num-classes {num_classes} allows 0 ... {num_classes - 1}")


class RecordSource:
    """The images of record files: `a.rec`, `a.rec;b.rec`, or a folder of them.

    Uses the given index, or the one beside the file; without an index, the file is scanned. With `on_bad`, the scan
    reports damaged records and continues after them. If `num_classes` is set, each record must have one label below it.
    `classes` are the names in the class files beside them.
    """

    num_classes: int | None = None

    def __init__(self, rec: str | Path, idx: str | Path | None = None, on_bad: OnBad = None) -> None:
        recs = _record_files(rec)
        self._reader = IndexedReader.from_files(recs, index_files(recs, idx or None), on_bad)
        self.classes: ClassNames = read_class_names(*recs)
        if not len(self):
            raise DataError(f"{rec} has no records; create it again: echelon data im2rec PREFIX FOLDER")

    def __len__(self) -> int:
        return len(self._reader)

    def read(self, number: int) -> Sample:
        """See Source."""
        file, record, offset = self._reader.locate(number)
        payload = file.read(offset, record)[0]
        try:
            header, image = unpack(payload)
        except DataError as error:
            raise RecordError(file.path, offset, record, str(error)) from None
        labels = header.labels
        label = float(labels[0]) if len(labels) == 1 else labels
        if self.num_classes is not None:
            try:
                _check_class(label, self.num_classes)
            except DataError as error:
                raise RecordError(file.path, offset, record, str(error)) from None
        return Sample(image, label)

    def where(self, number: int) -> str:
        """See Source."""
        file, record, offset = self._reader.locate(number)
        return f"{file.path}: record {record} at byte {offset}"


def _record_files(rec: str | Path) -> list[Path]:
    if Path(rec).is_dir():
        found = sorted(Path(rec).glob("*.rec"))
        if not found:
            raise DataError(f"no *.rec in the folder {rec}; create one: echelon data im2rec PREFIX FOLDER")
        return found
    return split_paths(rec)


class FolderSource:
    """Image files with labels.

    File names are strings and not Paths, because a million strings are pickled for a decode process in a moment. They
    are relative to the folder in which this process was when it created the source.
    """

    def __init__(self, files: Sequence[str | Path], labels: Sequence[float], classes: Sequence[str] = ()) -> None:
        if len(files) != len(labels):
            raise UsageError(f"{len(files)} files but {len(labels)} labels")
        self.files, self.labels, self.classes = [str(file) for file in files], list(labels), tuple(classes)
        self._base = os.getcwd()

    @classmethod
    def from_classes(cls, root: str | Path, classes: Sequence[str] = ()) -> FolderSource:
        """Use each subfolder as a class, numbered in the order of `classes`, or by name if that is empty."""
        root = Path(root)
        folders = sorted(entry for entry in root.iterdir() if entry.is_dir()) if root.is_dir() else []
        names = list(classes) or [folder.name for folder in folders]
        unknown = [folder.name for folder in folders if folder.name not in names]
        if unknown:
            raise DataError(
                f"{root} has the class {unknown[0]!r}, which the training images do not have: {', '.join(names)}"
            )
        found = [(path, float(names.index(folder.name))) for folder in folders for path in image_files(folder)]
        if not found:
            raise DataError(
                f"no images in class folders under {root}: searched {root.absolute()}/CLASS/ for "
                f"{', '.join(IMAGE_SUFFIXES)}; put the images of each class in their own folder"
            )
        return cls([path for path, _ in found], [label for _, label in found], names)

    @classmethod
    def from_known_classes(cls, root: str | Path, classes: Sequence[str]) -> FolderSource:
        """Number the subfolders as `classes` if one of them has such a name; otherwise in the order of their names."""
        is_known = any(Path(root, name).is_dir() for name in classes if name)
        return cls.from_classes(root, classes if is_known else ())

    def __len__(self) -> int:
        return len(self.files)

    def read(self, number: int) -> Sample:
        """See Source."""
        try:
            return Sample(Path(self._base, self.files[number]).read_bytes(), self.labels[number])
        except OSError as error:
            raise DataError(f"{self.where(number)}: {error.strerror}") from error

    def where(self, number: int) -> str:
        """See Source."""
        return f"{self.files[number]} (image {number})"


def is_work_for_processes(source: Source) -> bool:
    """Whether decode processes are worth their start-up time for this source, and the source can be pickled."""
    return type(source) in (RecordSource, FolderSource) and len(source) >= MANY


def image_files(folder: Path) -> list[Path]:
    """Return the images in a folder and below, by their suffix."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file())
