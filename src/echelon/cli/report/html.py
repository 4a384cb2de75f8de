"""`echelon report html`: one page about one run, or about several runs in the same charts. It needs no network."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager
from pathlib import Path

from rich.console import Console

from echelon.atomic_file import AtomicFile, check_writable


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str) -> None:
    """Add `html`."""
    parser = commands.add_parser(name, help="write a page about one or several runs", description=__doc__)
    add_runs(parser)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="the file to write (default: report.html in the folder of the run, or here for several runs)",
    )
    parser.set_defaults(run=_run)


def add_runs(parser: argparse.ArgumentParser) -> None:
    """Add the runs to read."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="the folder of a run, for example runs/latest")


def reading() -> AbstractContextManager[object]:
    """Show on a terminal that runs are read: a log of a million events takes some seconds."""
    return Console(stderr=True).status("reading the events…")


def _run(options: argparse.Namespace) -> int:
    from echelon.report.charts.recorded import find_run, read_runs
    from echelon.report.page.page import page

    folder = find_run(options.runs[0]) if len(options.runs) == 1 else Path()
    output: Path = options.output or folder / "report.html"
    check_writable(output)
    with reading():
        content = page(read_runs(options.runs)).encode("utf-8", "replace")
    with AtomicFile(output) as file:
        file.stream.write(content)
    print(f"wrote {output} ({len(content) / 1000:.0f} kB)")
    return 0
