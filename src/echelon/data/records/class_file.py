"""The names of the classes of a record file or list: a text file beside it, NAME.classes.

MXNet's formats have no place for names, so the .rec, .idx and .lst files stay as MXNet writes and reads them. Line k of
the text, counted from 0, is the name of class k; an empty line is a class without a name.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

from echelon.atomic_file import AtomicFile
from echelon.errors import DataError

ClassNames: TypeAlias = tuple[str, ...]

SUFFIX = ".classes"


def class_file(path: str | os.PathLike[str]) -> Path:
    """Return the name of the class file of a record file or list."""
    return Path(path).with_suffix(SUFFIX)


def write_class_names(path: str | os.PathLike[str], names: Sequence[str]) -> None:
    """Write the class file of a record file or list; without any name, remove one that an earlier list left."""
    if not any(names):
        class_file(path).unlink(missing_ok=True)
        return
    lines = (readable(name).replace("\n", " ") for name in names)
    with AtomicFile(class_file(path)) as file:
        file.stream.write("".join(f"{line}\n" for line in lines).encode())


def read_class_names(*paths: str | os.PathLike[str]) -> ClassNames:
    """Return the names of the classes of record files or lists; nothing if there are no class files beside them."""
    return merge_class_names((class_file(path), _read(class_file(path))) for path in paths)


def _read(file_name: Path) -> ClassNames:
    try:
        text = file_name.read_bytes().decode()
    except FileNotFoundError:
        return ()
    except UnicodeDecodeError as error:
        raise DataError(f"{file_name} is not valid UTF-8 (byte {error.start}); save the file as UTF-8") from None
    except OSError as error:
        raise DataError(f"{file_name} cannot be read: {error.strerror}") from error
    return tuple(line.strip() for line in text.rstrip("\r\n").split("\n")) if text.strip() else ()


def merge_class_names(named: Iterable[tuple[object, ClassNames]]) -> ClassNames:
    """Return the names of classes from several places; raises DataError if two places name a class differently."""
    merged: list[str] = []
    places: list[object] = []
    for place, names in named:
        for number, name in enumerate(names):
            if number == len(merged):
                merged.append(name)
                places.append(place)
            elif name and merged[number] and name != merged[number]:
                raise DataError(
                    f"class {number} is {merged[number]!r} in {places[number]}, but {name!r} in {place}: a label does "
                    "not mean the same in both; pack both from folders with the same classes, or correct the names"
                )
            elif name:
                merged[number], places[number] = name, place
    return tuple(merged)


def readable(name: str) -> str:
    """Return the name of a folder as valid Unicode; bytes that are not UTF-8 become replacement characters."""
    return os.fsencode(name).decode(errors="replace")
