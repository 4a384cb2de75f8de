"""Finds the files of a data set: those named on the command line, or those in the data folder.

Owns the search and the errors when nothing is found. The table of data sets is in `datasets`.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from echelon.data.loading.memory import MemorySource
from echelon.data.loading.sources import FolderSource, RecordSource, class_number
from echelon.data.records.class_file import ClassNames, merge_class_names
from echelon.data.sets.formats import FORMATS, FileFormat, find_file, find_splits, read_decompressed, read_idx
from echelon.data.sets.published import get_command, published_as
from echelon.errors import DataError, UsageError

FileSource: TypeAlias = RecordSource | FolderSource

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DataOptions:
    """The data flags of the command line. None means the data set's own default; files are under ./data by default."""

    data_dir: str | Path = "data"
    data_train: str | None = None
    data_train_idx: str | None = None
    data_val: str | None = None
    data_val_idx: str | None = None
    image_shape: tuple[int, int, int] | None = None
    num_classes: int | None = None
    num_examples: int | None = None
    skip_bad_records: bool = False


def open_images(name: str, options: DataOptions, train_rec: str, val_rec: str) -> tuple[FileSource, FileSource | None]:
    """Open the training and validation images that are named, or those in the data folder.

    Without --data-val, validation images are those found beside the training images, if there are any.
    """
    root = Path(options.data_train or options.data_dir)
    beside: str | Path | None
    if _has_class_folders(root):
        named: str | Path = root / "train" if (root / "train").is_dir() else root
        beside = root / "val" if (root / "val").is_dir() else None
    else:
        named = options.data_train or root / train_rec
        beside = file_in_data_dir(options, val_rec) if not options.data_train else None
        if not options.data_train and not Path(named).is_file():
            raise DataError(
                f"{name}: no file {train_rec} and no class folders in {root.absolute()}; create it: "
                f"echelon data im2rec {Path(named).with_suffix('')} FOLDER, or name your files with --data-train"
            )
    train = _open(named, options.data_train_idx, options)
    held_out = options.data_val or beside
    if held_out is None:
        return train, None
    validation = _open(held_out, options.data_val_idx, options, train)
    if isinstance(validation, RecordSource):
        merge_class_names([(named, train.classes), (held_out, validation.classes)])  # raises if they differ
    return train, validation


def _has_class_folders(path: str | Path) -> bool:
    return Path(path).is_dir() and not list(Path(path).glob("*.rec"))


def _open(path: str | Path, idx: str | None, options: DataOptions, train: FileSource | None = None) -> FileSource:
    """Open a file or folder. Validation folders are numbered as the classes of the training images, `train`."""
    if _has_class_folders(path):
        if idx:
            raise UsageError(f"the index {idx} is for a .rec, but {path} is a folder of class folders; leave it out")
        if isinstance(train, RecordSource):
            return FolderSource.from_known_classes(path, train.classes)
        return FolderSource.from_classes(path, train.classes if train else ())
    bad: list[DataError] = []
    source = RecordSource(path, idx, bad.append if options.skip_bad_records else None)
    _report(bad)
    return source


def load_into_memory(source: FileSource, options: DataOptions) -> MemorySource:
    """Decode all images of a source."""
    bad: list[DataError] = []
    decoded = MemorySource.from_source(source, on_bad=bad.append if options.skip_bad_records else None)
    _report(bad)
    return decoded


def _report(bad: list[DataError]) -> None:
    if bad:
        log.warning("bad records skipped while opening: %d, the first: %s", len(bad), bad[0])


def count_classes(source: FileSource, options: DataOptions) -> int:
    """Return the number of class folders, or the largest label of all records plus one, or of named classes if larger.

    Reads the header of every record, about 0.3 million per second.
    """
    if isinstance(source, FolderSource):
        return len(source.classes)
    largest = len(source.classes) - 1 if source.classes else 0
    for number in range(len(source)):
        try:
            largest = max(largest, _class_of(source, number))
        except DataError:
            if not options.skip_bad_records:
                raise
    return largest + 1


def _class_of(source: FileSource, number: int) -> int:
    label = source.read(number).label
    try:
        return class_number(label)
    except DataError as error:
        raise DataError(f"{source.where(number)}: {error}") from None


def load_published(name: str, title: str, format_name: str, options: DataOptions) -> tuple[MemorySource, MemorySource]:
    """Load train and validation of a published set from the data folder or the folder in it with the set's name."""
    root = Path(options.data_dir)
    file_format = FORMATS[format_name]
    folders = [below for folder in (root / name, root) for below in (folder, folder / file_format.folder)]
    mismatch, first = None, file_format.train[0]
    for folder in folders:
        if find_file(folder, first) is not None:
            splits = find_splits(folder, file_format)
            found = _find_mismatch(name, splits, root) if file_format.read is read_idx else None
            if found is None:
                return _load(file_format, splits.get("train", []), title), _load(
                    file_format, splits.get("val", []), title
                )
            mismatch = mismatch or found
    searched = ", ".join(str(folder.absolute()) for folder in folders)
    why = mismatch or f"no file {first} (or {first}.gz) in any of {searched}"
    raise DataError(f"{title}: {why}; download the set: {get_command(name, options.data_dir)}")


def _find_mismatch(name: str, splits: dict[str, list[Path]], root: Path) -> str | None:
    """Return why idx files are not, or may not be, those of the set: MNIST and Fashion-MNIST have the same file names.

    The label files, which are small, are compared with the published ones. Unknown files belong to the set that their
    folder is named after, and those directly in the data folder belong to MNIST, as for MXNet's script.
    """
    for _, labels in splits.values():
        of = published_as(read_decompressed(labels))
        if of not in (None, name):
            return f"{labels}: this is {of}, whose files have the same names"
        if of is None and labels.parent == root and name not in ("mnist", root.name):
            return f"{labels} may belong to MNIST, which has the same file names; put your own files in {root / name}"
    return None


def published_classes(file_format: FileFormat, files: list[Path]) -> ClassNames:
    """Return the names of the classes of some files. MNIST and Fashion-MNIST are told apart by their labels."""
    if file_format.read is not read_idx:
        return file_format.classes
    name = published_as(read_decompressed(files[1]))
    return FORMATS[f"{name} (idx)"].classes if name else file_format.classes


def _load(file_format: FileFormat, files: list[Path], title: str) -> MemorySource:
    if not files:
        names = ", ".join(file_format.train + file_format.val)
        raise DataError(f"{title}: some of the files {names} are missing; add them")
    blocks = list(file_format.read(files, file_format.num_classes, None))
    images = np.concatenate([block.images for block in blocks])
    labels = np.concatenate([block.labels for block in blocks])
    return MemorySource(images if images.ndim == 4 else images[..., None], labels, os.fspath(files[0].parent))


def file_in_data_dir(options: DataOptions, name: str) -> str | None:
    """Return the path of a file in the data folder, or None if it does not exist."""
    path = Path(options.data_dir) / name
    return str(path) if path.is_file() else None
