"""`echelon report tables`: result tables of runs, in the columns that MXNet's users publish.

A RUN is a run folder, a folder of several, a log of `echelon bench run`, or a JSON file of results. Runs that failed or
were stopped stay in the tables, with their status in the last column.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from echelon.errors import DataError, UsageError
from echelon.report.logs.files import read_lines
from echelon.report.tables.choose import NAMES, make_tables
from echelon.report.tables.folders import find_runs, read_run
from echelon.report.tables.record import RunRecord
from echelon.report.tables.results import read_results, record_of_experiment
from echelon.report.tables.table import FORMATS


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str) -> None:
    """Add `tables`."""
    parser = commands.add_parser(
        name, help="print result tables of runs", description=__doc__, usage="echelon report tables [flags] RUN…"
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="a run folder, a folder of several, a log or a JSON file"
    )
    about = f"format of the output: {', '.join(FORMATS)}"
    parser.add_argument("--format", choices=list(FORMATS), default="markdown", metavar="FORMAT", help=about)
    parser.add_argument(
        "--table",
        action="append",
        choices=NAMES,
        default=[],
        metavar="NAME",
        help=f"print only this table: {', '.join(NAMES)}; may be repeated (default: all that have rows)",
    )
    parser.add_argument(
        "--target", type=float, metavar="ACCURACY", help="accuracy of the time-to-accuracy table (default: the runs')"
    )
    parser.add_argument(
        "--every",
        type=int,
        metavar="N",
        help="show every N-th epoch and the last one (default: all, and every tenth of 20 epochs and more)",
    )
    parser.add_argument(
        "--infrastructure",
        "--cluster",
        metavar="NAME",
        help="name of the machines in the tables (default: the model of their GPU or CPU)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the tables of the runs that the command line names."""
    records = read_all(options.runs)
    if options.infrastructure:
        records = [replace(record, infrastructure=options.infrastructure) for record in records]
    tables = make_tables(records, options.table, options.target, options.every)
    if options.format == "csv" and len(tables) != 1:
        raise UsageError("--format csv writes one table; choose it with --table")
    print(FORMATS[options.format](tables))
    return 0


def read_all(paths: Sequence[str]) -> list[RunRecord]:
    """Return the records of all runs, each once, in the order of the command line."""
    records: list[RunRecord] = []
    seen: set[Path] = set()
    for given in paths:
        path = Path(given)
        for source in _sources(path):
            if source.resolve() not in seen:
                seen.add(source.resolve())
                records += _read(source)
    return records


def _sources(path: Path) -> list[Path]:
    """Return the run folders of a folder, or the file itself."""
    if not path.exists():
        raise DataError(f"{path} does not exist; give a run folder such as runs/latest")
    if path.is_file():
        return [path]
    found = find_runs(path)
    if not found:
        raise DataError(f"{path} has no run: neither events.jsonl nor summary.json lies in it or below it")
    return found


def _read(source: Path) -> list[RunRecord]:
    if source.is_dir():
        return [read_run(source)]
    return read_results(source) if source.suffix == ".json" else [_read_log(source)]


def _read_log(path: Path) -> RunRecord:
    from echelon.bench.dlbs.records import read_records

    values = read_records(line for _, line, _ in read_lines(str(path)))
    if "exp.model" not in values:
        raise DataError(
            f"{path} is not a log of `echelon bench run`: no line begins with __exp.model__=; "
            "echelon report parse-log reads logs of a training"
        )
    return record_of_experiment(values)
