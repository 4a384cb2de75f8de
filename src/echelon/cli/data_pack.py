"""`echelon data im2rec` and `convert`: what packs images into record files, once the flags are read.

Owns what PREFIX means, and which flags go together. Prints as `data_run` does.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from pathlib import Path

from echelon.atomic_file import check_writable
from echelon.cli.data_run import BadRecords
from echelon.data.pack import convert, im2rec
from echelon.data.pack import lists as imagelist
from echelon.data.progress import bar
from echelon.data.sets import layouts
from echelon.errors import DataError, UsageError


def run_im2rec(args: argparse.Namespace) -> int:
    """Pack a folder of images, or lists, into record files."""
    _refuse_packing_flags(args)
    encoding = _encoding(args)
    prefix, root = _prefix(args), Path(args.root)
    if not root.is_dir():
        raise UsageError(f"no folder {root}; expected the folder with the images: im2rec PREFIX FOLDER")
    check_writable(prefix.with_name(f"{prefix.name}.rec"))
    lists = [] if args.list else _find_lists(prefix)
    if lists:
        _refuse_listing_flags(args, lists)
        print(f"packing {' '.join(map(str, lists))}")
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


def _prefix(args: argparse.Namespace) -> Path:
    if os.path.basename(args.prefix) in ("", os.curdir, os.pardir):
        example = os.path.join(args.prefix, "data")
        raise UsageError(
            f"PREFIX {args.prefix!r} is a folder; give how the names of its files begin, for example {example}"
        )
    return Path(args.prefix)


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
    """Return the lists PREFIX.lst and PREFIX_*.lst, or the one list that is named outright.

    MXNet packs PREFIX*.lst, with `k` a `kitchen.lst`, too; such are only mentioned.
    """
    if prefix.suffix == ".lst":
        return [prefix] if prefix.is_file() else []
    name = prefix.name
    beside = [path for path in sorted(prefix.parent.glob("*.lst")) if path.name.startswith(name)]
    lists = [path for path in beside if path.name == f"{name}.lst" or path.name.startswith(f"{name}_")]
    if others := [str(path) for path in beside if path not in lists]:
        meant = f"for PREFIX that is {name}.lst and {name}_*.lst, others are named outright"
        print(f"not packed: {' '.join(others)}; {meant}", file=sys.stderr)
    return lists


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
    prefix = _prefix(args)
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
