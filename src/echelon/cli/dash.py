"""`echelon dash`: a live page of a run, in a browser. It only reads the folder of the run."""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress

from echelon.dash.serve import DEFAULT_PORT, check_installed, listen, serve
from echelon.report.follow import run_folder
from echelon.train.flags.parser import Parser
from echelon.transport.listening import LOOPBACK


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add `dash`."""
    parser = subparsers.add_parser("dash", help="show a run as a live page in a browser", description=__doc__)
    parser.add_argument("folder", nargs="?", metavar="RUN", help="folder of the run (default: runs/latest)")
    parser.add_argument(
        "--port", type=int, help=f"port of the page; 0: any free one (default: {DEFAULT_PORT}, or a free one)"
    )
    parser.add_argument(
        "--host", default=LOOPBACK, help="address to listen on; others than loopback ones require a token"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C."""
    check_installed()
    folder = run_folder(options.folder)
    listener = listen(options.host, options.port)
    print(f"echelon: the live page of {folder} is {listener.url} (Ctrl-C ends it)", file=sys.stderr, flush=True)
    with suppress(KeyboardInterrupt):
        serve(folder, listener)
    return 0
