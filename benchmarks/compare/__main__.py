"""`python -m benchmarks.compare`: measure Echelon beside its peers, and write docs/results.md and its pictures.

`make bench` runs this. Every row writes a file of benchmarks/results; the document's blocks are made from these files,
so that an interrupted run continues with --missing, and --tables writes the document again without measuring.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.compare.picture import draw_comparison
from benchmarks.compare.results import read_result, read_results
from benchmarks.compare.rows import BLOCKS, ROWS, Row, choose
from benchmarks.compare.run import Outcome, Plan, run_rows, shown_s
from benchmarks.compare.tables import make_block
from benchmarks.document import rewrite_block
from echelon.errors import EchelonError
from echelon.observe.machine import commit
from echelon.system import raised_by_sigterm

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = "results.md"
PICTURE = "comparison.png"


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser("benchmarks.compare", description="The published comparison, on one machine.")
    add = parser.add_argument
    add("--only", nargs="+", default=[], metavar="ROW", help="run only these rows or blocks of rows")
    add("--missing", action="store_true", help="run only rows that have no result of this commit")
    add("--show", action="store_true", help="print the rows and their commands, and exit")
    add("--tables", action="store_true", help="write the document from the result files, and exit")
    add("--quick", action="store_true", help="tiny settings that test every row in about a minute; no real figures")
    add(
        "--output",
        type=Path,
        metavar="DIR",
        help="write benchmarks/results and docs in this folder (default: this repository; for --quick a new one)",
    )
    add("--limit-s", type=float, default=3600.0, metavar="S", help="end a row that takes longer (%(default)s)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    try:
        return run(make_parser().parse_args(arguments))
    except EchelonError as error:
        print(f"benchmarks.compare: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("benchmarks.compare: interrupted; --missing continues", file=sys.stderr)
        return 130


def run(args: argparse.Namespace) -> int:
    """Show the rows, write the document, or run the rows."""
    rows = [row for row in choose(args.only) if row.quick or not args.quick]
    if args.show:
        return show(rows)
    output = args.output or (Path(tempfile.mkdtemp(prefix="echelon-compare-")) if args.quick else ROOT)
    results, docs = output.resolve() / "benchmarks" / "results", output.resolve() / "docs"
    with raised_by_sigterm(KeyboardInterrupt), ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="echelon-compare-logs-")))
        plan = Plan(ROOT, results, docs, logs, args.quick, args.limit_s)
        if not (docs / DOCUMENT).exists():
            docs.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / "docs" / DOCUMENT, docs / DOCUMENT)
        if args.tables:
            return write_document(plan, [])
        return measure(missing(rows, results) if args.missing else rows, plan)


def show(rows: Sequence[Row]) -> int:
    """Print the rows, about how long they take, and their commands."""
    for row in rows:
        print(f"{row.name:<18} {shown_s(row.seconds):>7}  {row.command}")
    return 0


def missing(rows: Sequence[Row], results: Path) -> list[Row]:
    """Return the rows that have no result of this commit."""
    now = commit()

    def measured(row: Row) -> bool:
        result = read_result(row, results)
        return result is not None and result.commit == now

    return [row for row in rows if not measured(row)]


def measure(rows: Sequence[Row], plan: Plan) -> int:
    """Run the rows, and write the document after each one, so that an interrupted run loses nothing."""
    outcomes: list[Outcome] = []
    for outcome in run_rows(rows, plan, say):
        outcomes.append(outcome)
        write_document(plan, outcomes)
    failed = [outcome.row.name for outcome in outcomes if outcome.error]
    not_run = [f"{outcome.row.name} ({outcome.skipped})" for outcome in outcomes if outcome.skipped]
    say(f"{len(outcomes) - len(failed) - len(not_run)} of {len(outcomes)} rows measured; see {plan.docs / DOCUMENT}")
    if not_run:
        say(f"not run: {', '.join(not_run)}")
    if failed:
        say(f"failed: {', '.join(failed)}; the causes are above and in the document")
    return 1 if failed else 0


def write_document(plan: Plan, outcomes: Sequence[Outcome]) -> int:
    """Write the blocks and the picture from all result files."""
    path = plan.docs / DOCUMENT
    text = path.read_text(encoding="utf-8")
    for block in BLOCKS:
        rows = [row for row in ROWS if row.block == block]
        text = rewrite_block(text, f"bench:{block}", make_block(rows, read_results(rows, plan.results), outcomes))
    path.write_text(text, encoding="utf-8")
    draw_comparison(read_results(ROWS, plan.results), plan.docs / PICTURE)
    return 0


def say(line: str) -> None:
    """Print a line about the progress."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
