"""The `echelon` command. Every sub-command has its own module, which is imported only when it is used."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from echelon import __version__
from echelon.errors import EchelonError
from echelon.system import exit_on_interrupt

if TYPE_CHECKING:
    from echelon.train.flags.parser import Parser

COMMANDS = {
    "train": "train a model on many workers of this machine",
    "score": "measure a checkpoint on a validation set",
    "predict": "classify image files with a checkpoint",
    "convert": "convert trained models from and to MXNet's .params files",
    "launch": "start a scheduler, servers and workers around any command",
    "doctor": "check the hosts of a job before it starts",
    "node": "run this machine's part of a job that is started on every machine by hand",
    "join": "start workers that join a running job",
    "data": "download published data sets; create, check and convert RecordIO data",
    "report": "print tables of training logs and runs",
    "top": "show a run in a terminal",
    "dash": "show a run as a live page in a browser",
    "bench": "benchmark Echelon against other systems",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["help"]:
        given = [*given[1:], "--help"]
    return run_command(lambda: make_parser(given), given)


def run_command(make: Callable[[], Parser], given: Sequence[str]) -> int:
    """Parse arguments, run what they name, and return its exit status. Errors are printed as one line."""
    try:
        with exit_on_interrupt():
            parser = make()
        status = _run(parser, given)
        sys.stdout.flush()  # here, because an error of the flush at exit would be a traceback
        return status
    except EchelonError as error:
        print(f"echelon: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("echelon: stopped by SIGINT", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # nobody reads the output any more, as after `… | head -1`
        _discard_output()
        return 128 + signal.SIGPIPE
    except OSError as error:  # for example a full disk
        _discard_output()
        where = f" {error.filename}" if error.filename else " the output"
        print(f"echelon: cannot read or write{where}: {error.strerror or error}", file=sys.stderr)
        return 1


def _run(parser: Parser, given: Sequence[str]) -> int:
    if not given:
        parser.print_help()
        return 2
    options = parser.parse_args(given)
    return int(options.run(options))


def _discard_output() -> None:
    """Drop what standard output still holds, which cannot be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def make_parser(given: Sequence[str]) -> Parser:
    """Return the parser of these arguments: only the command that they name has its flags."""
    from echelon.train.flags.parser import Parser

    parser = Parser(
        prog="echelon",
        description="Distributed training where one flag sets how strictly workers wait for each other.",
        epilog="'echelon COMMAND --help' lists the flags of a command; 'echelon train --demo' shows what it does.",
    )
    parser.add_argument("--version", action="version", version=_versions(given), help="show the versions and exit")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    wanted = given[0] if given and given[0] in COMMANDS else None
    for name, summary in COMMANDS.items():
        if name == wanted:
            importlib.import_module(f"echelon.cli.{name}").add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=summary)
    return parser


def _versions(given: Sequence[str]) -> str:
    """Return the versions of what decides about results, if they are asked for."""
    if "--version" not in given:
        return ""
    import platform
    from importlib.metadata import version

    torch = version("torch")  # without its import, which takes seconds
    return f"echelon {__version__} (Python {platform.python_version()}, torch {torch})"


if __name__ == "__main__":
    sys.exit(main())
