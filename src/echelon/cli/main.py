"""The `echelon` command. Every sub-command has its own module, which is imported only when it is used."""

from __future__ import annotations

import importlib
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of

from echelon import __version__
from echelon.errors import EchelonError
from echelon.train.flags.parser import Parser

COMMANDS = {
    "train": "train a model on many workers of this machine",
    "score": "measure a checkpoint on a validation set",
    "predict": "classify image files with a checkpoint",
    "convert": "convert trained models from and to MXNet's .params files",
    "launch": "start a scheduler, servers and workers around any command",
    "data": "download published data sets; create, check and convert RecordIO data",
    "bench": "benchmark Echelon against other systems",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        parser = make_parser(given)
        if not given:
            parser.print_help()
            return 2
        options = parser.parse_args(given)
        return int(options.run(options))
    except EchelonError as error:
        print(f"echelon: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("echelon: stopped by SIGINT", file=sys.stderr)
        return 130


def make_parser(given: Sequence[str]) -> Parser:
    """Return the parser of these arguments: only the command that they name has its flags."""
    parser = Parser(
        prog="echelon",
        description="Distributed training where one flag sets how strictly workers wait for each other.",
        epilog="'echelon COMMAND --help' lists the flags of a command; 'echelon train --demo' shows what it does.",
    )
    parser.add_argument("--version", action="version", version=_versions(), help="show the versions and exit")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    wanted = given[0] if given and given[0] in COMMANDS else None
    for name, summary in COMMANDS.items():
        if name == wanted:
            importlib.import_module(f"echelon.cli.{name}").add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=summary)
    return parser


def _versions() -> str:
    """Return the versions of what decides about results."""
    try:
        torch = version_of("torch")  # without the import, which takes seconds
    except PackageNotFoundError:
        torch = "not installed"
    return f"echelon {__version__} (Python {platform.python_version()}, torch {torch})"


if __name__ == "__main__":
    sys.exit(main())
