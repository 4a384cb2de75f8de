"""What the commands of `echelon data` do once their flags are read, and what they print.

Results go to standard output, bad records and progress to standard error. A command returns 0, or 1 where `verify`
found a bad record; other faults are raised as errors. The work is in `echelon.data`; what packs images in `data_pack`.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from echelon.data.pack import extract
from echelon.data.pack import tools as recordtools
from echelon.data.progress import bar
from echelon.data.records import io as recordio
from echelon.data.sets import published
from echelon.errors import DataError

_SHOWN_FAULTS = 10


class BadRecords:
    """Counts bad records for --skip-bad-records and shows the first few."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.count = 0
        self.handler: Callable[[DataError], None] | None = self._count if args.skip_bad_records else None

    def _count(self, fault: DataError) -> None:
        self.count += 1
        if self.count <= _SHOWN_FAULTS:
            print(f"bad: {fault}", file=sys.stderr)

    def summary(self) -> str:
        """Return what to add to a result line."""
        return f", {self.count} bad skipped" if self.count else ""


def run_get(args: argparse.Namespace) -> int:
    """Download published sets."""
    wanted = [published.find_published(name) for name in args.names]
    for one in wanted:
        print(f"{one.name} from {args.mirror or one.address}", file=sys.stderr)
        for path, is_new in published.get(one, Path(args.data_dir), args.mirror):
            print(f"{path}: {path.stat().st_size:,} bytes, SHA-256 is right{'' if is_new else ', was here already'}")
    return 0


def run_rec2idx(args: argparse.Namespace) -> int:
    """Write the index of a record file."""
    rec = Path(args.rec)
    idx = Path(args.idx) if args.idx else recordio.index_path(rec)
    bad = BadRecords(args)
    num_records = recordtools.make_index(rec, idx, bad.handler)
    print(f"{idx}: {num_records} records{bad.summary()}")
    return 0


def run_info(args: argparse.Namespace) -> int:
    """Say what is in a record file."""
    bad = BadRecords(args)
    with bar(args.rec, None) as advance:
        summary = recordtools.summarise(args.rec, bad.handler, advance)
    print(args.rec)
    for name, value in _describe(args.rec, summary, bad):
        print(f"  {name:<8}{value}")
    return 0


def _describe(rec: str, summary: recordtools.Summary, bad: BadRecords) -> list[tuple[str, str]]:
    lines = [("records", f"{summary.num_records}{bad.summary()}"), ("bytes", f"{summary.num_bytes:,}")]
    if summary.sizes:
        sizes = (min(summary.sizes), int(statistics.median(summary.sizes)), max(summary.sizes))
        lines.append(("payload", "{:,} ... {:,} ... {:,} bytes (least, median, most)".format(*sizes)))
    if summary.kinds:
        kinds = ", ".join(f"{count} {kind}" for kind, count in summary.kinds.most_common())
        lines.append(("images", f"{kinds}; the first is {summary.first_image}"))
        lines.append(("labels", _describe_labels(summary)))
    if summary.num_plain:
        lines.append(("plain", f"{summary.num_plain} records too short for an image header"))
    return [*lines, ("index", _describe_index(rec, summary.num_records))]


def _describe_labels(summary: recordtools.Summary) -> str:
    widths = "/".join(str(width) for width in sorted(summary.label_widths))
    counts = summary.labels.values()
    numbers = [label for label in summary.labels if not math.isnan(label)]
    ranges = [f"{min(numbers):g} ... {max(numbers):g}"] if numbers else []
    values = " and ".join(ranges + ["NaN"] * (len(numbers) < len(summary.labels)))
    return f"{len(summary.labels)} different, {values}, {min(counts)} ... {max(counts)} records each; {widths} a record"


def _describe_index(rec: str, num_records: int) -> str:
    if ";" in rec:
        return "not looked at: several files"
    idx = recordio.index_path(rec)
    if not idx.is_file():
        return f"none beside it; make it: echelon data rec2idx {rec}"
    num_keys = len(recordio.read_index(idx)[0])
    return f"{idx}, {num_keys} keys" + ("" if num_keys == num_records else " (not the number of records: verify it)")


def run_verify(args: argparse.Namespace) -> int:
    """Check every record; 1 where one is bad."""
    idxs = recordio.index_files(recordio.split_paths(args.rec), args.idx)
    names = ";".join(str(idx) for idx in idxs if idx is not None)
    bad = BadRecords(args)
    try:
        with bar(args.rec, None) as advance:
            num_good = recordtools.verify(args.rec, idxs, args.decode, bad.handler, advance)
    except recordio.RecordError as fault:
        print(f"bad: {fault}", file=sys.stderr)
        return 1
    print(f"{args.rec}: {num_good} good records{f', index {names}' if names else ', no index'}{bad.summary()}")
    return 0


def run_extract(args: argparse.Namespace) -> int:
    """Write the images of a record file to a folder."""
    bad = BadRecords(args)
    with bar(args.rec, args.limit) as advance:
        extracted = extract.extract(
            Path(args.rec),
            Path(args.out),
            raw=args.raw,
            limit=args.limit,
            on_bad=bad.handler,
            on_done=advance,
        )
    print(f"{args.out}: {extracted.num_files} files{bad.summary()}")
    if extracted.num_old_ids is not None:
        print(
            f"the records have {extracted.num_old_ids} different ids, and a list takes each once: "
            f"{extract.LIST_NAME} numbers them 0 ... {extracted.num_files - 1} instead",
            file=sys.stderr,
        )
    return 0
