"""Extracts the images of record files: OUT/LABEL/NUMBER.jpg, and OUT/extract.lst with all labels and ids.

If the records have a class file, OUT/extract.classes is a copy of it.

The folder appears when everything is written, so an error or Ctrl-C leaves nothing behind.

Packing OUT/extract.lst with pass-through and all labels gives the same images, labels and ids in the same order again.
Three things cannot be expressed in a list: an id that several records have (all records get new ids, and `Extracted`
says so), a second id (it becomes 0), and a single label that was stored as a list of one.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from echelon.atomic_file import check_writable, partial_folder
from echelon.data.pack.lists import Entry, write_list
from echelon.data.records import Header, Reader, RecordError, unpack
from echelon.data.records.check import OnDone, ignore
from echelon.data.records.class_file import read_class_names, write_class_names
from echelon.data.records.file import OnBad, report, split_paths
from echelon.data.records.image_header import image_suffix
from echelon.errors import DataError, UsageError

LIST_NAME = "extract.lst"


class Extracted(NamedTuple):
    """How many files were written. If the list has new ids 0, 1, 2 ..., `num_old_ids` is how many ids there were."""

    num_files: int
    num_old_ids: int | None = None


def extract(
    rec: Path,
    out: Path,
    *,
    raw: bool = False,
    limit: int | None = None,
    on_bad: OnBad = None,
    on_done: OnDone = ignore,
) -> Extracted:
    """Write all records, or the first `limit`, to a new folder. `raw` writes whole payloads and no list."""
    if out.is_dir() and any(out.iterdir()):
        raise UsageError(f"the folder {out} is not empty; give the name of a new folder")
    if limit is not None and limit < 1:
        raise UsageError(f"a limit of {limit} records: expected 1 or more")
    if not out.is_dir():
        check_writable(out)
    if out.is_file():
        raise UsageError(f"{out} is a file; give the name of a new folder")
    with partial_folder(out) as partial:
        with Reader(rec, on_bad) as reader:
            extracted = _extract(reader, partial, raw, limit, on_bad, on_done)
        if not raw and (names := read_class_names(*split_paths(rec))):
            write_class_names(partial / LIST_NAME, names)
        partial.replace(out)
    return extracted


def _extract(reader: Reader, folder: Path, raw: bool, limit: int | None, on_bad: OnBad, on_done: OnDone) -> Extracted:
    num_written = 0
    entries: list[Entry] = []
    for position, (file, number, offset, payload) in enumerate(islice(reader.located(), limit)):
        try:
            if raw:
                (folder / f"{position:08d}.bin").write_bytes(payload)
            else:
                header, image = unpack(payload)
                entries.append(_write_image(folder, position, header, image))
            num_written += 1
        except DataError as error:
            report(RecordError(file.path, offset, number, f"{error}; use --raw to extract other payloads"), on_bad)
        on_done(1)
    if raw:
        return Extracted(num_written)
    num_ids = len({entry.index for entry in entries})
    if num_ids == len(entries):
        write_list(folder / LIST_NAME, entries)
        return Extracted(num_written)
    write_list(folder / LIST_NAME, (replace(entry, index=number) for number, entry in enumerate(entries)))
    return Extracted(num_written, num_ids)


def _write_image(folder: Path, position: int, header: Header, image: memoryview) -> Entry:
    labels = tuple(header.labels.tolist())
    first = labels[0]
    name = f"{int(first):04d}" if first == first // 1 and first >= 0 else str(first)
    (folder / name).mkdir(exist_ok=True)
    path = f"{name}/{position:08d}{image_suffix(image)}"
    (folder / path).write_bytes(image)
    return Entry(header.id, labels, path)
