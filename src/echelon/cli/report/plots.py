"""`echelon report plots`: the charts of the page as PNG and SVG files."""

from __future__ import annotations

import argparse
from pathlib import Path

from echelon.cli.report.html import add_runs, reading
from echelon.errors import UsageError


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str) -> None:
    """Add `plots`."""
    parser = commands.add_parser(name, help="write the charts of runs as PNG and SVG files", description=__doc__)
    add_runs(parser)
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("plots"), metavar="DIR", help="the folder to write to"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from echelon.report.charts.all_charts import all_charts
    from echelon.report.charts.recorded import read_runs
    from echelon.report.colours import run_colours
    from echelon.report.plots.charts import FORMATS, write_charts

    if options.output.exists() and not options.output.is_dir():
        raise UsageError(f"cannot write to {options.output}: it is a file; give a folder with -o")
    with reading():
        runs = read_runs(options.runs)
        charts = all_charts(runs, run_colours([run.store for run in runs]))
    written = write_charts(charts, options.output)
    print(f"wrote {len(written) // len(FORMATS)} charts as {' and '.join(FORMATS)} to {options.output}/")
    return 0
