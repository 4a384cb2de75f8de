"""What one does with record files: verify, describe and index them.

Owns what counts as a bad image record: no frame, no header, or bytes that do not decode. Prints nothing; a fault goes
to `on_bad`, or is raised where there is none.
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

from echelon.atomic_file import AtomicFile, check_writable
from echelon.data.pack.im2rec import DECODE_ERRORS, decode_fault
from echelon.data.records.file import PathLike
from echelon.data.records.frame import MAGIC_BYTES
from echelon.data.records.image_header import image_suffix, unpack
from echelon.data.records.io import Reader, RecordError, index_path, read_index, scan_offsets, split_paths
from echelon.errors import DataError, UsageError

OnBad: TypeAlias = Callable[[RecordError], None] | None
OnDone: TypeAlias = Callable[[int], None]


def ignore(amount: int) -> None:
    """Show no progress."""


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
        """Count one record; one without an image header is plain."""
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
        self.labels[math.nan if math.isnan(label) else label] += 1  # one NaN for all: each is unequal to every other
        if not self.first_image:
            self.first_image = _image_size(image)


def _image_size(image: memoryview) -> str:
    try:
        with Image.open(io.BytesIO(image)) as opened:
            return f"{opened.width} x {opened.height} {opened.mode} {opened.format}"
    except DECODE_ERRORS:
        return "no image"


def summarise(rec: Path, on_bad: OnBad = None, on_done: OnDone = ignore) -> Summary:
    """Read a record file through and count what is in it."""
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
    """Check every record, with `decode` every image too, and each file's index if it has one; return how many are good.

    `rec` may be several files, `a.rec;b.rec`.
    """
    num_good = 0
    heads: dict[Path, list[int]] = defaultdict(list)  # of bad records too: an index may point at one that is reported

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
    remedy = f"make the index anew: echelon data rec2idx {rec} {idx}"
    known = set(heads)
    for number, (key, offset) in enumerate(zip(keys.tolist(), listed.tolist(), strict=True)):
        if offset not in known:
            reason = f"key {key} of {idx} points here, where no record begins; {remedy}"
            report(RecordError(rec, offset, number, reason), on_bad)
    unlisted = sorted(known.difference(listed.tolist()))
    if unlisted:
        reason = f"{idx} does not list it: it has {len(listed)} of {len(known)} records; {remedy}"
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


def report(fault: RecordError, on_bad: OnBad) -> None:
    """Hand a fault to who counts them, or raise it."""
    if on_bad is None:
        raise fault
    on_bad(fault)


def make_index(rec: Path, idx: Path, on_bad: OnBad = None) -> int:
    """Write the index of a record file, keys 0, 1, 2 ...; return the number of records."""
    _check_index_name(rec, idx)
    check_writable(idx)
    offsets = scan_offsets(rec).tolist() if on_bad is None else _good_offsets(rec, on_bad)
    with AtomicFile(idx) as file:
        file.stream.writelines(b"%d\t%d\n" % pair for pair in enumerate(offsets))
    return len(offsets)


def _check_index_name(rec: Path, idx: Path) -> None:
    """Refuse to write an index over records, which `rec2idx *.rec` would do."""
    if len(split_paths(rec)) > 1:
        raise UsageError(f"{rec} are several record files; an index is of one: run rec2idx for each")
    if not idx.is_file():
        return
    with idx.open("rb") as stream:
        is_records = stream.read(len(MAGIC_BYTES)) == MAGIC_BYTES
    if is_records or (rec.exists() and idx.samefile(rec)):
        instead = index_path(rec)
        raise UsageError(f"the index of {rec} cannot be {idx}, which is a record file; name it for example {instead}")


def _good_offsets(rec: Path, on_bad: OnBad) -> list[int]:
    with Reader(rec, on_bad) as reader:
        return [offset for _, _, offset, _ in reader.located()]
