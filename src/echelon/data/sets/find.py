"""Which files the images of a dataset are in: what the command line names, or what lies in the data folder.

Owns the looking and what is said where nothing is found. Which datasets there are is `datasets`' to know.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from echelon.data.loading.memory import MemorySource
from echelon.data.loading.sources import FolderSource, RecordSource, class_number
from echelon.data.sets.layouts import LAYOUTS, Layout, find_file, find_parts, read_idx, read_unpacked
from echelon.data.sets.published import get_command, published_as
from echelon.errors import DataError, UsageError

FileSource: TypeAlias = RecordSource | FolderSource

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DataOptions:
    """What the command line says about data. Nothing set means the dataset's own defaults, under ./data."""

    data_dir: str | Path = "data"
    data_train: str | None = None
    data_train_idx: str | None = None
    data_val: str | None = None
    data_val_idx: str | None = None
    image_shape: tuple[int, int, int] | None = None
    num_classes: int | None = None
    num_examples: int | None = None
    skip_bad_records: bool = False


def image_pair(name: str, options: DataOptions, train_rec: str, val_rec: str) -> tuple[FileSource, FileSource | None]:
    """The images that are named, or those in the data folder; validation is what is named, or there beside training."""
    root = Path(options.data_train or options.data_dir)
    beside: str | Path | None
    if _has_classes(root):
        named: str | Path = root / "train" if (root / "train").is_dir() else root
        beside = root / "val" if (root / "val").is_dir() else None
    else:
        named = options.data_train or root / train_rec
        beside = named_in(options, val_rec) if not options.data_train else None
        if not options.data_train and not Path(named).is_file():
            raise DataError(
                f"{name}: no file {train_rec} and no class folders in {root.absolute()}; make it: "
                f"echelon data im2rec {Path(named).with_suffix('')} FOLDER, or name yours with --data-train"
            )
    train = _open(named, options.data_train_idx, options)
    held_out = options.data_val or beside
    if held_out is None:
        return train, None
    classes = train.classes if isinstance(train, FolderSource) else ()
    return train, _open(held_out, options.data_val_idx, options, classes)


def _has_classes(path: str | Path) -> bool:
    return Path(path).is_dir() and not list(Path(path).glob("*.rec"))


def _open(path: str | Path, idx: str | None, options: DataOptions, classes: Sequence[str] = ()) -> FileSource:
    if _has_classes(path):
        if idx:
            raise UsageError(f"the index {idx} is for a .rec, and {path} is a folder of class folders; leave it out")
        return FolderSource.from_classes(path, classes)
    bad: list[DataError] = []
    source = RecordSource(path, idx, bad.append if options.skip_bad_records else None)
    _report(bad)
    return source


def in_memory(source: FileSource, options: DataOptions) -> MemorySource:
    bad: list[DataError] = []
    kept = MemorySource.from_source(source, on_bad=bad.append if options.skip_bad_records else None)
    _report(bad)
    return kept


def _report(bad: list[DataError]) -> None:
    if bad:
        log.warning("bad records skipped while opening: %d, the first: %s", len(bad), bad[0])


def count_classes(source: FileSource, options: DataOptions) -> int:
    """Folders tell; of records, one more than the largest label: reads every head, about 0.3 million a second."""
    if isinstance(source, FolderSource):
        return len(source.classes)
    most = 0
    for number in range(len(source)):
        try:
            most = max(most, _class_of(source, number))
        except DataError:
            if not options.skip_bad_records:
                raise
    return most + 1


def _class_of(source: FileSource, number: int) -> int:
    label = source.read(number).label
    try:
        return class_number(label)
    except DataError as error:
        raise DataError(f"{source.where(number)}: {error}") from None


def small_set(name: str, title: str, layout: Layout, options: DataOptions) -> tuple[MemorySource, MemorySource]:
    """Load a published set, from the folder itself or the one below it with the set's name."""
    root = Path(options.data_dir)
    folders = [below for folder in (root / name, root) for below in (folder, folder / layout.folder)]
    doubt, first = None, layout.train[0]
    for folder in folders:
        if find_file(folder, first) is not None:
            parts = find_parts(folder, layout)
            found_doubt = _doubt(name, parts, root) if layout.read is read_idx else None
            if found_doubt is None:
                return _load(layout, parts.get("train", []), title), _load(layout, parts.get("val", []), title)
            doubt = doubt or found_doubt
    looked = ", ".join(str(folder.absolute()) for folder in folders)
    why = doubt or f"no file {first} (or {first}.gz) in any of {looked}"
    raise DataError(f"{title}: {why}; get the set: {get_command(name, options.data_dir)}")


def _doubt(name: str, parts: dict[str, list[Path]], root: Path) -> str | None:
    """Say why idx files are not the set's, or may not be: MNIST and Fashion-MNIST give theirs the same names.

    The labels tell, which are few bytes. Files that nobody published are what their folder says; those of the plain
    data folder are MNIST, as for MXNet's script.
    """
    for _, labels in parts.values():
        of = published_as(read_unpacked(labels))
        if of not in (None, name):
            return f"{labels}: this is {of}, whose files have the same names"
        if of is None and labels.parent == root and name not in ("mnist", root.name):
            return f"{labels} may be MNIST's, which has that name, too; files of your own go to {root / name}"
    return None


def _load(layout: Layout, files: list[Path], title: str) -> MemorySource:
    if not files:
        raise DataError(f"{title}: only a part of {', '.join(layout.train + layout.val)} is there; get the rest")
    blocks = list(layout.read(files, layout.num_classes, None))
    images = np.concatenate([block.images for block in blocks])
    labels = np.concatenate([block.labels for block in blocks])
    return MemorySource(images if images.ndim == 4 else images[..., None], labels, os.fspath(files[0].parent))


def named_in(options: DataOptions, name: str) -> str | None:
    path = Path(options.data_dir) / name
    return str(path) if path.is_file() else None


def layout_named(name: str) -> Layout:
    return next(layout for layout in LAYOUTS if layout.name == name)
