"""Lists of images: lists a folder, shuffles, splits into train, val and test, reads and writes .lst files.

A line is `index<TAB>label[<TAB>label ...]<TAB>path`, with the path relative to a root folder. The lists are those that
MXNet's im2rec writes for the same folder and flags. Images are not opened here.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from echelon.atomic_file import AtomicFile
from echelon.data.records.file import report
from echelon.errors import DataError, UsageError

IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png")
SHUFFLE_SEED = 100
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Entry:
    """One image of a list."""

    index: int
    labels: tuple[float, ...]
    path: str


class Split(NamedTuple):
    """Some entries of a list, and the suffix of their file name: "", "_train", "_0_val" ..."""

    suffix: str
    entries: list[Entry]


def list_folder(
    root: Path,
    suffixes: Sequence[str] = IMAGE_SUFFIXES,
    recursive: bool = True,
    left_out: Counter[str] | None = None,
) -> list[Entry]:
    """List the images under `root`; every folder with images is a class, numbered in the order of the walk.

    Files with other suffixes are counted in `left_out`.
    """
    others: Counter[str] = Counter() if left_out is None else left_out
    if not root.is_dir():
        raise UsageError(
            f"{root} is not a folder; expected a folder with images, or with one subfolder of images per class"
        )
    wanted = {suffix.lower() if suffix.startswith(".") else f".{suffix.lower()}" for suffix in suffixes}
    classes: dict[str, int] = {}
    entries: list[Entry] = []
    for folder, subfolders, names in os.walk(root, followlinks=True):
        subfolders.sort()
        for name in sorted(names):
            suffix = os.path.splitext(name)[1].lower()
            if suffix in wanted:
                label = classes.setdefault(folder, len(classes))
                path = os.path.relpath(os.path.join(folder, name), root)
                entries.append(Entry(len(entries), (float(label),), path))
            else:
                others[suffix] += 1
        if not recursive:
            break
    if not entries:
        raise DataError(f"no image with suffix {' '.join(sorted(wanted))} under {root}; use --exts for other suffixes")
    return entries


def class_names(entries: Iterable[Entry]) -> dict[int, str]:
    """Return the folder of each label of a list from `list_folder`."""
    return dict(sorted({int(entry.labels[0]): os.path.dirname(entry.path) or "." for entry in entries}.items()))


def shuffled(entries: list[Entry], seed: int = SHUFFLE_SEED) -> list[Entry]:
    """Return the entries in an order that depends only on the seed; each keeps its index."""
    entries = list(entries)
    random.Random(seed).shuffle(entries)
    return entries


def split_entries(
    entries: list[Entry], chunks: int = 1, train_ratio: float = 1.0, test_ratio: float = 0.0
) -> list[Split]:
    """Split a list into chunks, and each chunk into test (first), training and validation entries."""
    if chunks < 1 or chunks > len(entries):
        raise UsageError(f"--chunks {chunks}: expected 1 ... {len(entries)}, the number of images")
    if not 0 < train_ratio <= 1 or not 0 <= test_ratio < 1 or train_ratio + test_ratio > 1 + _ROUNDING:
        raise UsageError(
            f"--train-ratio {train_ratio} and --test-ratio {test_ratio}: expected a training ratio in (0, 1], "
            "a test ratio in [0, 1), and a sum of at most 1"
        )
    size = -(-len(entries) // chunks)
    splits: list[Split] = []
    for number in range(chunks):
        name = f"_{number}" if chunks > 1 else ""
        splits += _split_chunk(name, entries[number * size : (number + 1) * size], size, train_ratio, test_ratio)
    return [split for split in splits if split.entries]


def _split_chunk(name: str, entries: list[Entry], size: int, train_ratio: float, test_ratio: float) -> list[Split]:
    if train_ratio == 1:
        return [Split(name, entries)]
    num_test = int(size * test_ratio)
    has_rest = train_ratio + test_ratio < 1 - _ROUNDING
    end = num_test + int(size * train_ratio) if has_rest else len(entries)
    return [
        Split(f"{name}_train", entries[num_test:end]),
        Split(f"{name}_val", entries[end:]),
        Split(f"{name}_test", entries[:num_test]),
    ]


def write_list(path: Path, entries: Iterable[Entry]) -> None:
    """Write a .lst file; labels have six decimals, or more if a float32 needs them."""
    with AtomicFile(path) as file:
        for entry in entries:
            if any(mark in entry.path for mark in "\t\r\n"):
                raise UsageError(
                    f"{entry.path!r}: a list cannot contain a name with a tab or line break; rename the file"
                )
            labels = "\t".join(map(_label_text, entry.labels))
            file.stream.write(os.fsencode(f"{entry.index}\t{labels}\t{entry.path}\n"))


def _label_text(label: float) -> str:
    text = f"{label:f}"
    with np.errstate(over="ignore"):
        exact = np.float32(label)
        return text if np.float32(text) == exact else str(exact)


def read_list(path: Path, on_bad: Callable[[DataError], None] | None = None) -> list[Entry]:
    """Read a .lst file; with `on_bad`, a bad line is passed to it and left out."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        raise DataError(
            f"no list {path}; create it: echelon data im2rec --list {path.with_suffix('')} FOLDER"
        ) from None
    except OSError as error:
        raise DataError(f"cannot read list {path}: {error.strerror}") from error
    entries: list[Entry] = []
    seen: set[int] = set()
    for number, line in enumerate(lines, 1):
        try:
            entries += _parse(os.fsdecode(line), seen)
        except ValueError as error:
            fault = DataError(f"{path}, line {number}: {error}; expected `index<TAB>label<TAB>path`")
            report(fault, on_bad)
    return entries


def _parse(line: str, seen: set[int]) -> list[Entry]:
    """Return the entry of a line, or nothing for a blank line; raise ValueError if it is invalid."""
    if not line.strip():
        return []
    *fields, path = line.split("\t")  # not stripped: a path may begin or end with a space
    fields = [field.strip() for field in fields]
    if len(fields) < 2:
        raise ValueError(f"{len(fields) + 1} fields separated by tabs in {line!r}")
    if not fields[0].isdecimal():
        raise ValueError(f"the index {fields[0]!r} is not a whole number")
    index = int(fields[0])
    if index in seen:
        raise ValueError(f"the index {index} is also on an earlier line")
    try:
        labels = tuple(float(field) for field in fields[1:])
    except ValueError:
        raise ValueError(f"a label is not a number in {line!r}") from None
    seen.add(index)
    return [Entry(index, labels, path)]
