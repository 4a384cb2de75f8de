"""The commands of `echelon data` that write new data: get, im2rec and convert.

Owns the meaning of PREFIX and which flags can be combined.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from pathlib import Path

from echelon.atomic_file import check_writable
from echelon.cli.data.common import BadRecords, Commands, add_command
from echelon.data.pack import lists
from echelon.data.pack.convert import convert_split, record_path
from echelon.data.pack.im2rec import COLOUR, Encoding, pack_list
from echelon.data.progress import bar
from echelon.data.records.class_file import class_file, read_class_names, write_class_names
from echelon.data.sets import published
from echelon.data.sets.find import published_classes
from echelon.data.sets.formats import find_format
from echelon.errors import DataError, UsageError
from echelon.system import usable_cores


def add_get(commands: Commands) -> None:
    """Add `get`."""
    about = "download a data set as its authors publish it, and check it"
    command = add_command(commands, "get", run_get, about, skips_bad_records=False)
    command.add_argument("names", metavar="NAME", nargs="+", help=", ".join(published.PUBLISHED))
    command.add_argument("--data-dir", default="data", metavar="FOLDER", help="folder of data files")
    command.add_argument("--mirror", metavar="ADDRESS", help="address of a web folder with the same files")


def run_get(args: argparse.Namespace) -> int:
    """Download published sets."""
    wanted = [published.find_published(name) for name in args.names]
    for one in wanted:
        print(f"{one.name} from {args.mirror or one.address}", file=sys.stderr)
        for path, is_new in published.get(one, Path(args.data_dir), args.mirror):
            known = "" if is_new else ", already present"
            print(f"{path}: {path.stat().st_size:,} bytes, SHA-256 is correct{known}")
    return 0


def add_im2rec(commands: Commands) -> None:
    """Add `im2rec`."""
    about = "pack a folder of images, or lists, into .rec and .idx"
    command = add_command(commands, "im2rec", run_im2rec, about)
    command.add_argument(
        "prefix", metavar="PREFIX", help="output: PREFIX.rec; existing PREFIX.lst and PREFIX_*.lst are packed"
    )
    command.add_argument(
        "root", metavar="FOLDER", help="the images, one subfolder per class; the paths of a list are relative to it"
    )
    _add_list_flags(command.add_argument_group("lists"))
    _add_image_flags(command.add_argument_group("images"))


def _add_list_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--list", action="store_true", help="only write the lists, to inspect or edit before packing")
    group.add_argument(
        "--exts",
        nargs="+",
        default=list(lists.IMAGE_SUFFIXES),
        metavar="EXT",
        help="suffixes of images",
    )
    group.add_argument(
        "--recursive",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="search subfolders; each folder is a class (default: on)",
    )
    group.add_argument(
        "--shuffle", action=argparse.BooleanOptionalAction, default=True, help="shuffle the list (default: on)"
    )
    group.add_argument("--seed", type=int, default=lists.SHUFFLE_SEED, metavar="N", help="seed of the shuffle")
    group.add_argument(
        "--train-ratio",
        type=float,
        default=1.0,
        metavar="X",
        help="fraction of the images for PREFIX_train (default: %(default)s); the rest goes to PREFIX_val",
    )
    group.add_argument("--test-ratio", type=float, default=0.0, metavar="X", help="fraction for PREFIX_test")
    group.add_argument(
        "--chunks",
        type=int,
        default=1,
        metavar="N",
        help="number of files to spread the images over",
    )


def _add_image_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--resize", type=int, metavar="N", help="shorter edge in pixels; 0 keeps the size (default: 0)")
    group.add_argument("--center-crop", action="store_true", help="crop the centre square first")
    group.add_argument("--color", type=int, choices=(-1, 0, 1), help="1 colour, 0 grey, -1 unchanged (default: 1)")
    group.add_argument("--pass-through", action="store_true", help="store the files unchanged")
    group.add_argument(
        "--restart-interval",
        type=int,
        metavar="N",
        help="write restart markers into JPEGs about every N MCUs, so that crops load faster; 0 writes none "
        f"(default: {Encoding.restart_interval})",
    )
    group.add_argument("--pack-label", action="store_true", help="store all labels of a list, not only the first")
    _add_encoding_flags(group, ".jpg")


def _add_encoding_flags(command: argparse._ActionsContainer, suffix: str) -> None:
    # The defaults are None, so that --pass-through and --list can reject flags that were given.
    command.set_defaults(default_encoding=suffix)
    command.add_argument("--encoding", metavar=".jpg|.png", help=f"format of the stored images (default: {suffix})")
    command.add_argument(
        "--quality",
        type=int,
        metavar="N",
        help="JPEG quality 1 … 100 (default: 95), or PNG compression 0 … 9 (default: 6)",
    )
    threads = usable_cores()
    command.add_argument(
        "--num-thread",
        "--threads",
        type=int,
        default=threads,
        metavar="N",
        help="encoding threads",
    )


def run_im2rec(args: argparse.Namespace) -> int:
    """Pack a folder of images, or lists, into record files."""
    _reject_packing_flags(args)
    encoding = _encoding(args)
    prefix, root = _prefix(args), Path(args.root)
    if not root.is_dir():
        raise UsageError(f"no folder {root}; expected the folder with the images: im2rec PREFIX FOLDER")
    check_writable(prefix.with_name(f"{prefix.name}.rec"))
    found = [] if args.list else _find_lists(prefix)
    if found:
        _reject_listing_flags(args, found)
        print(f"packing {' '.join(map(str, found))}")
        for path in found:
            bad = BadRecords(args)
            _pack(args, path.with_suffix(".rec"), lists.read_list(path, bad.handler), encoding, bad)
            if known := read_class_names(path):
                print(f"{class_file(path)}: names of {len(known)} classes")
        return 0
    if prefix.suffix == ".lst":
        raise DataError(f"no list {prefix}; create it: echelon data im2rec --list {prefix.with_suffix('')} {root}")
    entries = _list_images(root, args)
    ordered = lists.shuffled(entries, args.seed) if args.shuffle else entries
    splits = lists.split_entries(ordered, args.chunks, args.train_ratio, args.test_ratio)
    names = lists.class_names(entries)
    print("\n".join(f"label {label}: {name}" for label, name in names.items()))
    for split in splits:
        path = prefix.with_name(prefix.name + split.suffix + ".lst")
        if args.list:
            lists.write_list(path, split.entries)
            print(f"{path}: {len(split.entries)} images")
        else:
            _pack(args, path.with_suffix(".rec"), split.entries, encoding, BadRecords(args))
        write_class_names(path, ["" if name == os.curdir else name for name in names.values()])
    return 0


def _prefix(args: argparse.Namespace) -> Path:
    if os.path.basename(args.prefix) in ("", os.curdir, os.pardir):
        example = os.path.join(args.prefix, "data")
        raise UsageError(
            f"PREFIX {args.prefix!r} is a folder; give the beginning of the file names too, for example {example}"
        )
    return Path(args.prefix)


def _list_images(root: Path, args: argparse.Namespace) -> list[lists.Entry]:
    left_out: Counter[str] = Counter()
    entries = lists.list_folder(root, args.exts, args.recursive, left_out)
    if left_out:
        files = ", ".join(f"{count} {suffix or 'without suffix'}" for suffix, count in left_out.most_common())
        print(f"left out: {files}; use --exts to pack other suffixes", file=sys.stderr)
    return entries


def _encoding(args: argparse.Namespace) -> Encoding:
    if args.num_thread < 1:
        raise UsageError(f"--num-thread {args.num_thread}: expected 1 or more")
    _reject_encoding_flags(args)
    encoding = args.default_encoding if args.encoding is None else args.encoding
    suffix = encoding if encoding.startswith(".") else f".{encoding}"
    quality = args.quality if args.quality is not None else (6 if suffix == ".png" else 95)
    color = COLOUR if args.color is None else args.color
    interval = Encoding.restart_interval if args.restart_interval is None else args.restart_interval
    return Encoding(suffix, quality, args.resize or 0, args.center_crop, color, args.pass_through, interval)


def _reject_encoding_flags(args: argparse.Namespace) -> None:
    """Reject flags that have no effect with --pass-through; Encoding itself rejects resize and center-crop."""
    given = _given(args, "encoding", "quality", "color", "restart_interval")
    if args.pass_through and given:
        raise UsageError(
            f"--pass-through stores files unchanged, so {' and '.join(given)} would have no effect; "
            "leave out one or the other"
        )


def _reject_packing_flags(args: argparse.Namespace) -> None:
    """Reject flags that have no effect with --list, which reads no image."""
    images = ("encoding", "quality", "resize", "center_crop", "color", "pass_through", "restart_interval")
    given = _given(args, *images, "pack_label")
    if args.list and given:
        raise UsageError(
            f"--list only writes lists, so {' and '.join(given)} would have no effect; use it when you pack the lists"
        )


def _given(args: argparse.Namespace, *names: str) -> list[str]:
    """Return those of the flags that are on the command line, as they would be typed."""
    flags = [(f"--{name.replace('_', '-')}", getattr(args, name)) for name in names]
    return [
        flag if value is True else f"{flag} {value}"
        for flag, value in flags
        if value is not None and value is not False
    ]


def _find_lists(prefix: Path) -> list[Path]:
    """Return the lists PREFIX.lst and PREFIX_*.lst, or PREFIX itself if it is a list.

    MXNet packs all PREFIX*.lst: for the prefix `k` also `kitchen.lst`. Such lists are only mentioned.
    """
    if prefix.suffix == ".lst":
        return [prefix] if prefix.is_file() else []
    name = prefix.name
    beside = [path for path in sorted(prefix.parent.glob("*.lst")) if path.name.startswith(name)]
    found = [path for path in beside if path.name == f"{name}.lst" or path.name.startswith(f"{name}_")]
    if others := [str(path) for path in beside if path not in found]:
        meant = f"PREFIX stands for {name}.lst and {name}_*.lst; to pack another list, give its full name"
        print(f"not packed: {' '.join(others)}; {meant}", file=sys.stderr)
    return found


def _reject_listing_flags(args: argparse.Namespace, found: list[Path]) -> None:
    if (args.train_ratio, args.test_ratio, args.chunks) != (1.0, 0.0, 1):
        names = " ".join(map(str, found))
        raise UsageError(
            f"--train-ratio, --test-ratio and --chunks create lists, but there are lists to pack already: {names}; "
            "leave the flags out, remove the lists, or create them again with --list"
        )


def _pack(args: argparse.Namespace, rec: Path, entries: list[lists.Entry], encoding: Encoding, bad: BadRecords) -> None:
    with bar(rec.name, len(entries)) as advance:
        result = pack_list(
            entries,
            Path(args.root),
            rec,
            encoding,
            all_labels=args.pack_label,
            threads=args.num_thread,
            on_bad=bad.handler,
            on_done=advance,
        )
    _print_written(rec, result.num_records, result.num_bytes, bad)


def _print_written(rec: Path, num_records: int, num_bytes: int, bad: BadRecords) -> None:
    print(f"{rec} and .idx: {num_records} records, {num_bytes:,} bytes{bad.summary()}")


def add_convert(commands: Commands) -> None:
    """Add `convert`."""
    about = "convert CIFAR (binary or python) or MNIST (idx or .gz) files to PREFIX_train and PREFIX_val .rec and .idx"
    command = add_command(commands, "convert", run_convert, about)
    command.add_argument("source", metavar="FOLDER", help="folder with the published files, unpacked")
    command.add_argument("prefix", metavar="PREFIX", help="output: PREFIX_train.rec, PREFIX_val.rec and their .idx")
    command.set_defaults(resize=0, center_crop=False, color=COLOUR, pass_through=False, restart_interval=0)
    _add_encoding_flags(command, ".png")


def run_convert(args: argparse.Namespace) -> int:
    """Convert a folder of CIFAR or MNIST files to PREFIX_train.rec and PREFIX_val.rec."""
    file_format, splits = find_format(Path(args.source))
    prefix = _prefix(args)
    encoding = _encoding(args)
    print(f"{args.source}: {file_format.name}")
    for split, files in splits.items():
        bad = BadRecords(args)
        rec = record_path(prefix, split)
        with bar(rec.name, None) as advance:
            result = convert_split(
                file_format,
                files,
                rec,
                encoding=encoding,
                threads=args.num_thread,
                on_bad=bad.handler,
                on_done=advance,
            )
        write_class_names(rec, published_classes(file_format, files))
        _print_written(rec, result.num_records, result.num_bytes, bad)
    return 0
