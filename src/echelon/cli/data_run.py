"""What the commands of `echelon data` do once their flags are read, and what they print.

Results go to standard output, bad records and progress to standard error. A command returns 0, or 1 where `verify`
found a bad record; other faults are raised as errors. The work is in `echelon.data`.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from echelon.data import convert, extract, im2rec, imagelist, layouts, published, recordio, recordtools
from echelon.data.atomic import check_writable
from echelon.data.progress import bar
from echelon.errors import DataError, UsageError

_SHOWN_FAULTS = 10
_LIST_SUFFIX = re.compile(r"(_\d+)?(_train|_val|_test)?\.lst")


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


def run_im2rec(args: argparse.Namespace) -> int:
    """Pack a folder of images, or lists, into record files."""
    _refuse_packing_flags(args)
    encoding = _encoding(args)
    prefix, root = Path(args.prefix), Path(args.root)
    if not root.is_dir():
        raise UsageError(f"no folder {root}; expected the folder with the images: im2rec PREFIX FOLDER")
    check_writable(prefix.with_name(f"{prefix.name}.rec"))
    lists = [] if args.list else _find_lists(prefix)
    if lists:
        _refuse_listing_flags(args, lists)
        for path in lists:
            bad = BadRecords(args)
            _pack(args, path.with_suffix(".rec"), imagelist.read_list(path, bad.handler), encoding, bad)
        return 0
    if prefix.suffix == ".lst":
        raise DataError(f"no list {prefix}; make it: echelon data im2rec --list {prefix.with_suffix('')} {root}")
    entries = _list(root, args)
    parts = imagelist.cut(
        imagelist.shuffled(entries, args.seed) if args.shuffle else entries,
        args.chunks,
        args.train_ratio,
        args.test_ratio,
    )
    print("\n".join(f"label {label}: {name}" for label, name in imagelist.class_names(entries).items()))
    for part in parts:
        path = prefix.with_name(prefix.name + part.suffix + ".lst")
        if args.list:
            imagelist.write_list(path, part.entries)
            print(f"{path}: {len(part.entries)} images")
        else:
            _pack(args, path.with_suffix(".rec"), part.entries, encoding, BadRecords(args))
    return 0


def _list(root: Path, args: argparse.Namespace) -> list[imagelist.Entry]:
    left_out: Counter[str] = Counter()
    entries = imagelist.list_folder(root, args.exts, args.recursive, left_out)
    if left_out:
        files = ", ".join(f"{count} {suffix or 'without suffix'}" for suffix, count in left_out.most_common())
        print(f"left out: {files}; --exts names the suffixes to pack", file=sys.stderr)
    return entries


def _encoding(args: argparse.Namespace) -> im2rec.Encoding:
    if args.num_thread < 1:
        raise UsageError(f"--num-thread {args.num_thread}: expected 1 or more")
    _refuse_encoding_flags(args)
    encoding = args.default_encoding if args.encoding is None else args.encoding
    suffix = encoding if encoding.startswith(".") else f".{encoding}"
    quality = args.quality if args.quality is not None else (6 if suffix == ".png" else 95)
    color = im2rec.COLOUR if args.color is None else args.color
    interval = im2rec.Encoding.restart_interval if args.restart_interval is None else args.restart_interval
    return im2rec.Encoding(suffix, quality, args.resize or 0, args.center_crop, color, args.pass_through, interval)


def _refuse_encoding_flags(args: argparse.Namespace) -> None:
    """With --pass-through nothing is decoded or encoded; resize and center-crop are Encoding's to refuse."""
    given = _given(args, "encoding", "quality", "color", "restart_interval")
    if args.pass_through and given:
        raise UsageError(
            f"--pass-through stores files as they are, so {' and '.join(given)} can have no effect; "
            "leave out the one or the other"
        )


def _refuse_packing_flags(args: argparse.Namespace) -> None:
    """With --list no image is read; --num-thread changes no result anyway."""
    images = ("encoding", "quality", "resize", "center_crop", "color", "pass_through", "restart_interval")
    given = _given(args, *images, "pack_label")
    if args.list and given:
        raise UsageError(
            f"--list writes lists only, so {' and '.join(given)} can have no effect; give that when they are packed"
        )


def _given(args: argparse.Namespace, *names: str) -> list[str]:
    """Those of the flags that are on the command line, as they are there."""
    flags = [(f"--{name.replace('_', '-')}", getattr(args, name)) for name in names]
    return [
        flag if value is True else f"{flag} {value}"
        for flag, value in flags
        if value is not None and value is not False
    ]


def _find_lists(prefix: Path) -> list[Path]:
    """Return the lists PREFIX.lst, PREFIX_train.lst, PREFIX_0.lst ..., or the one list that is named outright."""
    if prefix.suffix == ".lst":
        return [prefix] if prefix.is_file() else []
    beside = sorted(prefix.parent.glob("*.lst"))
    return [
        path
        for path in beside
        if path.name.startswith(prefix.name) and _LIST_SUFFIX.fullmatch(path.name.removeprefix(prefix.name))
    ]


def _refuse_listing_flags(args: argparse.Namespace, lists: list[Path]) -> None:
    if (args.train_ratio, args.test_ratio, args.chunks) != (1.0, 0.0, 1):
        names = " ".join(map(str, lists))
        raise UsageError(
            f"--train-ratio, --test-ratio and --chunks make lists, but there are some to pack already: {names}; "
            "leave the flags out, remove the lists, or make them anew with --list"
        )


def _pack(
    args: argparse.Namespace, rec: Path, entries: list[imagelist.Entry], encoding: im2rec.Encoding, bad: BadRecords
) -> None:
    with bar(rec.name, len(entries)) as advance:
        result = im2rec.pack_list(
            entries,
            Path(args.root),
            rec,
            encoding,
            all_labels=args.pack_label,
            threads=args.num_thread,
            on_bad=bad.handler,
            on_done=advance,
        )
    print(_wrote(rec, result.num_records, result.num_bytes, bad))


def _wrote(rec: Path, num_records: int, num_bytes: int, bad: BadRecords) -> str:
    return f"{rec} and .idx: {num_records} records, {num_bytes:,} bytes{bad.summary()}"


def run_convert(args: argparse.Namespace) -> int:
    """Turn a folder of CIFAR or MNIST files into PREFIX_train.rec and PREFIX_val.rec."""
    found = layouts.find_layout(Path(args.source))
    prefix = Path(args.prefix)
    encoding = _encoding(args)
    print(f"{args.source}: {found.layout.name}")
    for part, files in found.parts.items():
        bad = BadRecords(args)
        rec = convert.record_path(prefix, part)
        with bar(rec.name, None) as advance:
            result = convert.convert_part(
                found.layout,
                files,
                rec,
                encoding=encoding,
                threads=args.num_thread,
                on_bad=bad.handler,
                on_done=advance,
            )
        print(_wrote(rec, result.num_records, result.num_bytes, bad))
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
    idx = Path(args.idx) if args.idx else recordio.index_path(args.rec)
    has_index = bool(args.idx) or (";" not in args.rec and idx.is_file())
    bad = BadRecords(args)
    try:
        with bar(args.rec, None) as advance:
            num_good = recordtools.verify(args.rec, idx if has_index else None, args.decode, bad.handler, advance)
    except recordio.RecordError as fault:
        print(f"bad: {fault}", file=sys.stderr)
        return 1
    print(f"{args.rec}: {num_good} good records{f', index {idx}' if has_index else ', no index'}{bad.summary()}")
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
