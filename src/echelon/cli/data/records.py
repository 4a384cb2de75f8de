"""The commands of `echelon data` that read record files: rec2idx, info, verify and extract."""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from pathlib import Path

from echelon.cli.data.common import BadRecords, Commands, add_command
from echelon.data.pack.extract import LIST_NAME, extract
from echelon.data.progress import bar
from echelon.data.records import RecordError, check, index_path, read_index
from echelon.data.records.class_file import read_class_names
from echelon.data.records.file import index_files, split_paths
from echelon.data.records.writers import make_index

_NUM_NAMES = 10  # class names that `info` shows


def add_rec2idx(commands: Commands) -> None:
    """Add `rec2idx`."""
    about = "write the .idx of a .rec, with the keys 0, 1, 2 and so on"
    command = add_command(commands, "rec2idx", run_rec2idx, about)
    command.add_argument("rec", metavar="REC", help="record file")
    command.add_argument("idx", metavar="IDX", nargs="?", help="default: REC with the suffix .idx")


def run_rec2idx(args: argparse.Namespace) -> int:
    """Write the index of a record file."""
    rec = Path(args.rec)
    idx = Path(args.idx) if args.idx else index_path(rec)
    bad = BadRecords(args)
    num_records = make_index(rec, idx, bad.handler)
    print(f"{idx}: {num_records} records{bad.summary()}")
    return 0


def add_info(commands: Commands) -> None:
    """Add `info`."""
    about = "print what is in a .rec: records, images, labels, index"
    command = add_command(commands, "info", run_info, about)
    command.add_argument("rec", metavar="REC", help="record file")


def run_info(args: argparse.Namespace) -> int:
    """Print what is in a record file."""
    bad = BadRecords(args)
    with bar(args.rec, None) as advance:
        summary = check.summarise(args.rec, bad.handler, advance)
    print(args.rec)
    for name, value in _describe(args.rec, summary, bad):
        print(f"  {name:<8}{value}")
    return 0


def _describe(rec: str, summary: check.Summary, bad: BadRecords) -> list[tuple[str, str]]:
    lines = [("records", f"{summary.num_records}{bad.summary()}"), ("bytes", f"{summary.num_bytes:,}")]
    if summary.sizes:
        sizes = (min(summary.sizes), int(statistics.median(summary.sizes)), max(summary.sizes))
        lines.append(("payload", "{:,} ... {:,} ... {:,} bytes (smallest, median, largest)".format(*sizes)))
    if summary.kinds:
        kinds = ", ".join(f"{count} {kind}" for kind, count in summary.kinds.most_common())
        lines.append(("images", f"{kinds}; the first is {summary.first_image}"))
        lines.append(("labels", _describe_labels(summary)))
        lines += [("classes", names)] if (names := _describe_classes(rec)) else []
    if summary.num_plain:
        lines.append(("plain", f"{summary.num_plain} records too short for an image header"))
    return [*lines, ("index", _describe_index(rec, summary.num_records))]


def _describe_labels(summary: check.Summary) -> str:
    widths = "/".join(str(width) for width in sorted(summary.label_widths))
    counts = summary.labels.values()
    numbers = [label for label in summary.labels if not math.isnan(label)]
    ranges = [f"{min(numbers):g} ... {max(numbers):g}"] if numbers else []
    values = " and ".join(ranges + ["NaN"] * (len(numbers) < len(summary.labels)))
    each = f"{min(counts)} ... {max(counts)} records each"
    return f"{len(summary.labels)} different, {values}, {each}; {widths} per record"


def _describe_classes(rec: str) -> str:
    names = read_class_names(*split_paths(rec))
    return ", ".join(names[:_NUM_NAMES]) + (f", … ({len(names)} names)" if len(names) > _NUM_NAMES else "")


def _describe_index(rec: str, num_records: int) -> str:
    if ";" in rec:
        return "not checked: several files"
    idx = index_path(rec)
    if not idx.is_file():
        return f"none beside it; create it: echelon data rec2idx {rec}"
    num_keys = len(read_index(idx)[0])
    return f"{idx}, {num_keys} keys" + ("" if num_keys == num_records else " (not the number of records: verify it)")


def add_verify(commands: Commands) -> None:
    """Add `verify`."""
    about = "check every record of a .rec; exit with status 1 and name the first bad record"
    command = add_command(commands, "verify", run_verify, about)
    command.add_argument("rec", metavar="REC", help="record file")
    command.add_argument("--idx", metavar="IDX", help="index to check, or a.idx;b.idx; default: the .idx beside REC")
    command.add_argument("--decode", action="store_true", help="decode every image too")


def run_verify(args: argparse.Namespace) -> int:
    """Check every record; return 1 if one is bad."""
    idxs = index_files(split_paths(args.rec), args.idx)
    names = ";".join(str(idx) for idx in idxs if idx is not None)
    bad = BadRecords(args)
    try:
        with bar(args.rec, None) as advance:
            num_good = check.verify(args.rec, idxs, args.decode, bad.handler, advance)
    except RecordError as fault:
        print(f"bad: {fault}", file=sys.stderr)
        return 1
    print(f"{args.rec}: {num_good} good records{f', index {names}' if names else ', no index'}{bad.summary()}")
    return 0


def add_extract(commands: Commands) -> None:
    """Add `extract`."""
    about = "write the images of a .rec to a new folder, with one subfolder per label"
    command = add_command(commands, "extract", run_extract, about)
    command.add_argument("rec", metavar="REC", help="record file")
    command.add_argument("out", metavar="FOLDER", help="folder to create")
    command.add_argument("--limit", type=int, metavar="N", help="only the first N records")
    command.add_argument("--raw", action="store_true", help="write whole payloads as .bin files, images or not")


def run_extract(args: argparse.Namespace) -> int:
    """Write the images of a record file to a folder."""
    bad = BadRecords(args)
    with bar(args.rec, args.limit) as advance:
        extracted = extract(
            Path(args.rec), Path(args.out), raw=args.raw, limit=args.limit, on_bad=bad.handler, on_done=advance
        )
    print(f"{args.out}: {extracted.num_files} files{bad.summary()}")
    if extracted.num_old_ids is not None:
        print(
            f"the records have only {extracted.num_old_ids} different ids, but a list needs one per image: "
            f"{LIST_NAME} uses 0 ... {extracted.num_files - 1} instead",
            file=sys.stderr,
        )
    return 0
