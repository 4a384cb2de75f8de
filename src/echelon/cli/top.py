"""`echelon top`: a run in a terminal, as it is now: workers, servers, who is slow and why, the last decision."""

from __future__ import annotations

import argparse
from contextlib import suppress

from echelon.report.follow import RunFollower, run_folder
from echelon.report.terminal.display import stdout_console
from echelon.report.terminal.top import Top
from echelon.train.flags.parser import Parser


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add `top`."""
    parser = subparsers.add_parser("top", help="show a run in a terminal", description=__doc__)
    parser.add_argument("folder", nargs="?", metavar="RUN", help="folder of the run (default: runs/latest)")
    parser.add_argument("--once", action="store_true", help="print the run as it is now, and exit")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Show the run until it ends, or until Ctrl-C."""
    top = Top(RunFollower(run_folder(options.folder)), stdout_console())
    if options.once:
        top.print()
        return 0
    with suppress(KeyboardInterrupt):
        top.show()
    return 0
