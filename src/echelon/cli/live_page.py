"""The flag `--dash` of `train` and `launch`: the live page of a job while it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from echelon.dash.serve import DEFAULT_PORT, Listener, PageProcess, check_installed, listen, read_address
from echelon.errors import UsageError

_USUAL = "usual"


def add_dash_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag."""
    parser.add_argument(
        "--dash",
        nargs="?",
        const=_USUAL,
        metavar="PORT",
        help=f"serve a live page of the run on this port of 127.0.0.1, or on HOST:PORT with a token ({DEFAULT_PORT} or "
        "a free port if the flag has no value; default: no page)",
    )


def listener_from(given: str | None) -> Listener | None:
    """Bind the socket that the flag asks for. Mistakes, and a port in use, are errors before the job starts."""
    if given is None:
        return None
    check_installed()
    if given == _USUAL:
        return listen()
    try:
        address = read_address(given)
    except UsageError as error:
        raise UsageError(f"--dash {given}: {error}; --dash without a port stands before another flag") from error
    return listen(*address)


@contextmanager
def live_page(listener: Listener | None, folder: Path) -> Iterator[None]:
    """Serve the page of a run while the block runs, and print its address; without a listener, nothing."""
    if listener is None:
        yield
        return
    with PageProcess(folder, listener):
        print(f"echelon: live page: {listener.url}", file=sys.stderr, flush=True)
        yield
