"""`echelon data`: the flags of its commands, which get, make, check, describe, extract and convert data.

What they do is in `data_run` and `data_pack`.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from typing import TypeAlias

from echelon.cli import data_pack, data_run
from echelon.data.pack import im2rec
from echelon.data.pack import lists as imagelist
from echelon.data.records.io import RecordError
from echelon.data.sets.published import PUBLISHED
from echelon.errors import DataError
from echelon.system import raised_by_sigterm, usable_cores

Run: TypeAlias = Callable[[argparse.Namespace], int]
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_parser(subparsers: Commands) -> None:
    """Add `data` and its commands to the main parser."""
    about = "Get published sets; make, check, describe, extract and convert RecordIO files (.rec, .idx, .lst)."
    commands = subparsers.add_parser("data", help="get, make and check data", description=about).add_subparsers(
        dest="data_command", metavar="COMMAND", required=True
    )
    _add_get(commands)
    _add_im2rec(commands)
    _add_convert(commands)
    command = _command(
        commands, "rec2idx", data_run.run_rec2idx, "write the .idx of a .rec, with the keys 0, 1, 2 and so on"
    )
    command.add_argument("rec", metavar="REC")
    command.add_argument("idx", metavar="IDX", nargs="?", help="default: REC with the suffix .idx")
    command = _command(commands, "info", data_run.run_info, "say what is in a .rec: records, images, labels, index")
    command.add_argument("rec", metavar="REC")
    command = _command(
        commands, "verify", data_run.run_verify, "check every record of a .rec; exit status 1 names the first bad one"
    )
    command.add_argument("rec", metavar="REC")
    command.add_argument("--idx", metavar="IDX", help="index to check, or a.idx;b.idx; default: that beside REC")
    command.add_argument("--decode", action="store_true", help="decode every image too")
    command = _command(
        commands, "extract", data_run.run_extract, "write the images of a .rec to a new folder, one a label"
    )
    command.add_argument("rec", metavar="REC")
    command.add_argument("out", metavar="FOLDER")
    command.add_argument("--limit", type=int, metavar="N", help="only the first N records")
    command.add_argument("--raw", action="store_true", help="write whole payloads as .bin files, images or not")


class _Terminated(BaseException):
    """SIGTERM has come. As with Ctrl-C, nothing but what cleans up should catch it."""


def _command(
    commands: Commands, name: str, run: Run, about: str, *, reads_records: bool = True
) -> argparse.ArgumentParser:
    def guarded(args: argparse.Namespace) -> int:
        try:
            with raised_by_sigterm(_Terminated):
                return run(args)
        except _Terminated:
            print("echelon: stopped by SIGTERM", file=sys.stderr)
            return 128 + signal.SIGTERM
        except (RecordError, im2rec.ImageError) as error:
            raise DataError(f"{error}; --skip-bad-records leaves bad ones out") from error
        except OSError as error:  # disk full, permissions: say it as ours, without a traceback
            raise DataError(f"echelon data {name}: {error}") from error

    command = commands.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")
    command.set_defaults(run=guarded)
    if reads_records:
        command.add_argument(
            "--skip-bad-records", action="store_true", help="count and report bad records instead of failing"
        )
    return command


def _add_get(commands: Commands) -> None:
    about = "download a set as its authors publish it, and check it"
    command = _command(commands, "get", data_run.run_get, about, reads_records=False)
    command.add_argument("names", metavar="NAME", nargs="+", help=", ".join(PUBLISHED))
    command.add_argument("--data-dir", default="data", metavar="FOLDER", help="where data files are (%(default)s)")
    command.add_argument("--mirror", metavar="ADDRESS", help="another web folder that has the same files")


def _add_im2rec(commands: Commands) -> None:
    about = "pack a folder of images, or lists, into .rec and .idx"
    command = _command(commands, "im2rec", data_pack.run_im2rec, about)
    command.add_argument(
        "prefix", metavar="PREFIX", help="where to write: PREFIX.rec; PREFIX.lst and PREFIX_*.lst there are packed"
    )
    command.add_argument(
        "root", metavar="FOLDER", help="the images: one folder a class, or what a list's paths start at"
    )
    lists = command.add_argument_group("lists")
    lists.add_argument("--list", action="store_true", help="write the lists only, to look at or change before packing")
    lists.add_argument(
        "--exts",
        nargs="+",
        default=list(imagelist.IMAGE_SUFFIXES),
        metavar="EXT",
        help="suffixes of images (.jpeg .jpg .png)",
    )
    lists.add_argument(
        "--recursive",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="look into subfolders, every folder being a class (default)",
    )
    lists.add_argument(
        "--shuffle", action=argparse.BooleanOptionalAction, default=True, help="shuffle the list (default)"
    )
    lists.add_argument(
        "--seed", type=int, default=imagelist.SHUFFLE_SEED, metavar="N", help="of the shuffle (%(default)s)"
    )
    lists.add_argument(
        "--train-ratio",
        type=float,
        default=1.0,
        metavar="X",
        help="share for PREFIX_train (%(default)s); the rest is PREFIX_val",
    )
    lists.add_argument("--test-ratio", type=float, default=0.0, metavar="X", help="share for PREFIX_test (%(default)s)")
    lists.add_argument(
        "--chunks", type=int, default=1, metavar="N", help="files to spread the images over (%(default)s)"
    )
    images = command.add_argument_group("images")
    images.add_argument("--resize", type=int, metavar="N", help="shorter edge in pixels; 0 keeps the size (0)")
    images.add_argument("--center-crop", action="store_true", help="cut the middle square out first")
    images.add_argument("--color", type=int, choices=(-1, 0, 1), help="1 colour, 0 grey, -1 as it is (1)")
    images.add_argument("--pass-through", action="store_true", help="store the files as they are")
    images.add_argument(
        "--restart-interval",
        type=int,
        metavar="N",
        help="restart markers in JPEGs about every N MCUs, for loading crops quickly; 0 for none "
        f"({im2rec.Encoding.restart_interval})",
    )
    images.add_argument("--pack-label", action="store_true", help="store all labels of a list, not only the first")
    _add_encoding(images, ".jpg")


def _add_convert(commands: Commands) -> None:
    about = "turn CIFAR (binary or python) or MNIST (idx, .gz too) files into PREFIX_train and PREFIX_val .rec and .idx"
    command = _command(commands, "convert", data_pack.run_convert, about)
    command.add_argument("source", metavar="FOLDER", help="where the published files are, unpacked")
    command.add_argument("prefix", metavar="PREFIX")
    command.set_defaults(resize=0, center_crop=False, color=im2rec.COLOUR, pass_through=False, restart_interval=0)
    _add_encoding(command, ".png")


def _add_encoding(command: argparse._ActionsContainer, suffix: str) -> None:
    # What is given must be told from what is not: --pass-through and --list go with none of it.
    command.set_defaults(default_encoding=suffix)
    command.add_argument("--encoding", metavar=".jpg|.png", help=f"how images are stored ({suffix})")
    command.add_argument("--quality", type=int, metavar="N", help="JPEG 1 ... 100 (95), or PNG level 0 ... 9 (6)")
    threads = usable_cores()
    command.add_argument(
        "--num-thread", "--threads", type=int, default=threads, metavar="N", help="threads that encode (%(default)s)"
    )
