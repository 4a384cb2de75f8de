"""Check a record file, or describe what is in it.

Decides what counts as a bad image record: a broken frame, a broken header, or bytes that do not decode. A bad record is
passed to `on_bad`, or raised where that is None.
"""

from __future__ import annotations

import io
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from PIL import Image

from echelon.data.records.file import OnBad, PathLike, RecordError, read_index, report, split_paths
from echelon.data.records.image_header import image_suffix, unpack
from echelon.data.records.readers import Reader
from echelon.errors import DataError

OnDone: TypeAlias = Callable[[int], None]

DECODE_ERRORS = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)  # what Pillow raises on bad bytes


def ignore(amount: int) -> None:
    """Do nothing: show no progress."""


def decode_fault(error: Exception) -> str:
    """Return Pillow's message without the address of the buffer."""
    return str(error).split(" <")[0]


@dataclass
class Summary:
    """What is in a record file."""

    num_records: int = 0
    num_bytes: int = 0
    num_plain: int = 0
    labels: Counter[float] = field(default_factory=Counter)
    label_widths: Counter[int] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    sizes: list[int] = field(default_factory=list)
    first_image: str = ""

    def add(self, payload: memoryview) -> None:
        """Count one record. A record without an image header counts as plain."""
        self.num_records += 1
        self.sizes.append(len(payload))
        try:
            header, image = unpack(payload)
        except DataError:
            self.num_plain += 1
            return
        self.kinds[image_suffix(image)] += 1
        self.label_widths[len(header.labels)] += 1
        label = float(header.labels[0])
        self.labels[math.nan if math.isnan(label) else label] += 1  # the same NaN object, because NaNs are unequal
        if not self.first_image:
            self.first_image = _describe_image(image)


def _describe_image(image: memoryview) -> str:
    try:
        with Image.open(io.BytesIO(image)) as opened:
            return f"{opened.width} x {opened.height} {opened.mode} {opened.format}"
    except DECODE_ERRORS:
        return "not an image"


def summarise(rec: Path, on_bad: OnBad = None, on_done: OnDone = ignore) -> Summary:
    """Read a whole record file and count what is in it."""
    summary = Summary()
    with Reader(rec, on_bad) as reader:
        summary.num_bytes = sum(len(file.data) for file in reader.files)
        for *_, payload in reader.located():
            summary.add(payload)
            on_done(1)
    return summary


def verify(
    rec: PathLike, idxs: Sequence[Path | None], decode: bool, on_bad: OnBad = None, on_done: OnDone = ignore
) -> int:
    """Check every record, with `decode` every image too, and the index of each file that has one.

    `rec` may name several files, `a.rec;b.rec`. Returns the number of good records.
    """
    num_good = 0
    heads: dict[Path, list[int]] = defaultdict(list)  # of bad records too, because the index may list them

    def note(fault: RecordError) -> None:
        heads[fault.path].append(fault.offset)
        report(fault, on_bad)

    with Reader(rec, note) as reader:
        for file, number, offset, payload in reader.located():
            reason = _image_fault(payload) if decode else None
            if reason is not None:
                note(RecordError(file.path, offset, number, reason))
                continue
            heads[file.path].append(offset)
            num_good += 1
            on_done(1)
    for path, idx in zip(split_paths(rec), idxs, strict=True):
        if idx is not None:
            _verify_index(path, idx, heads[path], on_bad)
    return num_good


def _verify_index(rec: Path, idx: Path, heads: list[int], on_bad: OnBad) -> None:
    keys, listed = read_index(idx)
    remedy = f"create the index again: echelon data rec2idx {rec} {idx}"
    known = set(heads)
    for number, (key, offset) in enumerate(zip(keys.tolist(), listed.tolist(), strict=True)):
        if offset not in known:
            reason = f"key {key} of {idx} points here, but no record begins here; {remedy}"
            report(RecordError(rec, offset, number, reason), on_bad)
    unlisted = sorted(known.difference(listed.tolist()))
    if unlisted:
        reason = f"{idx} does not list it: it lists {len(listed)} of {len(known)} records; {remedy}"
        report(RecordError(rec, unlisted[0], heads.index(unlisted[0]), reason), on_bad)


def _image_fault(payload: memoryview) -> str | None:
    try:
        _, image = unpack(payload)
        with Image.open(io.BytesIO(image)) as opened:
            opened.load()
    except DataError as error:
        return str(error)
    except DECODE_ERRORS as error:
        return f"its image does not decode ({decode_fault(error)})"
    return None
