"""`echelon report parse-log`, and MXNet's `tools/parse_log.py`: the figures of training logs as a table by epoch.

Reads the log lines of all versions of MXNet and of Echelon. Several files are the logs of the workers of one training.
Figures are means over the workers, and speeds are sums.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Sequence

from echelon.cli.main import run_command
from echelon.report.logs.epochs import read_logs
from echelon.report.logs.text import FORMATS, SPEEDS, columns, rows_of
from echelon.train.flags.parser import Parser


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str) -> None:
    """Add `parse-log`."""
    parser = commands.add_parser(
        name,
        help="print the figures of training logs by epoch",
        description=__doc__,
        usage="echelon report parse-log [flags] LOG…",
    )
    parser.add_argument("logs", nargs="+", metavar="LOG", help="a log file; - reads standard input")
    _add_metric_names(parser, [], "default: all metrics of the log")
    _add_format(parser, FORMATS)
    parser.add_argument(
        "--speed",
        choices=SPEEDS,
        default="none",
        metavar="WHOSE",
        help="columns with samples per second: none, total (of all workers), or workers, which adds each one's",
    )
    parser.set_defaults(run=_run, sorts=True)


def _add_metric_names(parser: argparse.ArgumentParser, default: list[str], unset: str) -> None:
    parser.add_argument(
        "--metric-names",
        nargs="+",
        default=default,
        metavar="NAME",
        help=f"metrics to show, or the beginnings of their names ({unset})",
    )


def _add_format(parser: argparse.ArgumentParser, formats: Collection[str]) -> None:
    about = f"format of the output: {', '.join(formats)}; none has columns separated by tabs"
    parser.add_argument("--format", choices=list(formats), default="markdown", metavar="FORMAT", help=about)


def _run(options: argparse.Namespace) -> int:
    training = read_logs(options.logs)
    shown = columns(training, options.metric_names, options.speed)
    epochs = rows_of(training, shown)
    if options.sorts:
        epochs.sort(key=lambda epoch: epoch.number)
    notes = training.notes + (training.speed_notes if options.speed != "none" else [])
    if not epochs:
        notes.append("no epoch of the log is complete; --speed total shows more")
    print(FORMATS[options.format](epochs, shown))
    for note in notes:
        print(f"echelon: {note}", file=sys.stderr)
    return 0


def main_like_mxnet(arguments: Sequence[str] | None = None) -> int:
    """Run `tools/parse_log.py`, and return its exit status."""
    return run_command(_parser_like_mxnet, sys.argv[1:] if arguments is None else arguments)


def _parser_like_mxnet() -> Parser:
    parser = Parser(prog="parse_log.py", description="parse_log.py of MXNet. 'echelon report parse-log' does more.")
    parser.add_argument("logs", nargs=1, metavar="LOG", help="a log file; - reads standard input")
    _add_format(parser, ("markdown", "none"))
    _add_metric_names(parser, ["accuracy"], "default: accuracy")
    parser.set_defaults(run=_run, sorts=False, speed="none")
    return parser
