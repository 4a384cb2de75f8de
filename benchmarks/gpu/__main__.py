"""`python -m benchmarks.gpu`: run training commands on one GPU and compare their figures with targets.

`run` runs the rows as processes, `log` reads their logs, `results` stores one record per row, and `tables` shows the
records beside the published figures.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from benchmarks.document import rewrite_block
from benchmarks.gpu import mps
from benchmarks.gpu.results import Origin, Record, better, describe_gpu, read_folder, read_records, write_records
from benchmarks.gpu.rows import KINDS, LISTS, Row, choose
from benchmarks.gpu.run import Plan, Runner, shown_command
from benchmarks.gpu.tables import BLOCK, markdown
from echelon.errors import EchelonError
from echelon.observe.machine import commit
from echelon.system import raised_by_sigterm

ROOT = Path(__file__).resolve().parents[2]


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        "benchmarks.gpu", description="Speed and accuracy of the training commands on one GPU."
    )
    add = parser.add_argument
    add(
        "--list",
        choices=LISTS,
        default="gpu",
        help="the rows to choose from; tiny takes seconds on a CPU (%(default)s)",
    )
    add(
        "--only",
        nargs="+",
        default=[],
        metavar="ROW",
        help=f"run only these rows: {', '.join(KINDS)}, or names of rows",
    )
    add("--show", action="store_true", help="print the names and commands of the rows and exit")
    add(
        "--jobs",
        type=int,
        default=1,
        help="rows to run at the same time (%(default)s); speed rows run first, one at a time",
    )
    add("--mps", action="store_true", help="let processes share the GPU through CUDA's MPS, if this machine has it")
    add("--budget-s", type=float, default=float("inf"), metavar="S", help="start no more rows after this many seconds")
    add("--limit-s", type=float, default=1800.0, metavar="S", help="end a row that takes longer (%(default)s)")
    add("--data-dir", metavar="DIR", help="the --data-dir of every command that reads data")
    add("--data-note", default="not noted", metavar="TEXT", help="origin of the data, stored in the records")
    add("--extra", default="", metavar="FLAGS", help="flags to add to every command: --extra='--wd 0.0001'")
    add("--commit", help="commit to store in the records (default: ask git)")
    add(
        "--examples",
        type=Path,
        default=ROOT / "examples" / "image-classification",
        metavar="DIR",
        help="folder of the training scripts",
    )
    add("--log-dir", type=Path, metavar="DIR", help="keep the log of every row in this folder")
    add("--json", type=Path, default=ROOT / "benchmarks" / "results" / "gpu.json", metavar="FILE", help="result file")
    add("--keep", action="store_true", help="keep the records of FILE, except for the rows that run again")
    add("--missing", action="store_true", help="run only rows that no gpu*.json beside FILE contains; implies --keep")
    add("--tables", action="store_true", help="print the tables of all gpu*.json beside FILE and exit")
    add("--docs", type=Path, metavar="FILE", help="write the tables of all gpu*.json into this document")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    try:
        return run(make_parser().parse_args(arguments))
    except EchelonError as error:
        print(f"benchmarks.gpu: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def run(args: argparse.Namespace) -> int:
    """Show the rows, show the tables, or run the rows."""
    rows = choose(LISTS[args.list](), args.only)
    if args.show:
        return show(rows, args.extra)
    if args.tables:
        return report(args, None)
    with (
        raised_by_sigterm(KeyboardInterrupt),
        tempfile.TemporaryDirectory(prefix="echelon-gpu-") as folder,
        mps.started(Path(folder) / "mps") if args.mps else nullcontext("") as sharing,
    ):
        return measure(args, rows, args.log_dir or Path(folder), sharing)


def show(rows: list[Row], extra: str) -> int:
    """Print the rows and their commands."""
    for row in rows:
        print(f"{row.name:<28} {row.kind:<9} {shown_command(row, extra)}")
    return 0


def measure(args: argparse.Namespace, rows: list[Row], log_dir: Path, sharing: str = "") -> int:
    """Run the rows and store each record when its row ends. Return 0 if all rows have figures."""
    if sharing:
        print_progress(f"processes share the GPU by {sharing}")
    records = read_records(args.json) if args.keep or args.missing else {}
    if args.missing:
        measured = {name for name, record in read_folder(args.json.parent).items() if not record.error}
        rows = [row for row in rows if row.name not in measured]
    if not rows:
        return report(args, records)
    failed: list[str] = []
    command = command_line(args)

    def done(record: Record) -> None:
        records[record.name] = better(records.get(record.name), record)
        write_records(args.json, records.values(), command)
        failed.extend([record.name] if record.error else [])
        print_progress(outcome(record))

    plan = Plan(
        examples=args.examples,
        log_dir=log_dir,
        origin=find_origin(args, sharing),
        data_dir=args.data_dir,
        jobs=args.jobs,
        budget_s=args.budget_s,
        limit_s=args.limit_s,
    )
    not_run = Runner(plan, done, print_progress).run(rows)
    report(args, records)
    if not_run:
        names = " ".join(row.name for row in not_run)
        print_progress(f"not run because the budget of {args.budget_s:g} s is spent: {names}")
    return 1 if failed or not_run else 0


def report(args: argparse.Namespace, records: dict[str, Record] | None) -> int:
    """Print the tables of these records, or of all result files if None. The document gets those of all files."""
    rows = LISTS[args.list]()
    every = read_folder(args.json.parent)
    print(markdown(rows, every if records is None else records))
    if args.docs is not None:
        text = args.docs.read_text(encoding="utf-8")
        args.docs.write_text(rewrite_block(text, BLOCK, markdown(rows, every)), encoding="utf-8")
    return 0


def find_origin(args: argparse.Namespace, sharing: str) -> Origin:
    """Return what all records of this run have in common."""
    gpu, torch_version = describe_gpu()
    return Origin(args.commit or commit(), gpu, torch_version, args.data_note, args.extra, sharing)


def command_line(args: argparse.Namespace) -> str:
    """Return this command without the paths of this machine."""
    words = ["python", "-m", "benchmarks.gpu", "--list", args.list, "--jobs", str(args.jobs)]
    words += ["--only", *args.only] if args.only else []
    words += ["--mps"] if args.mps else []
    words += ["--data-dir", "DIR"] if args.data_dir else []
    words += [f"--extra={args.extra}"] if args.extra else []
    return shlex.join(words)


def outcome(record: Record) -> str:
    """Return one line about a finished row."""
    if record.error:
        return f"{record.name}: FAILED after {record.wall_s:.0f} s: {record.error}"
    found = []
    if record.kind == "speed" and (speed := record.speed) is not None:
        found.append(f"{speed.median:,.0f} samples/s ({speed.p10:,.0f} – {speed.p90:,.0f}, {speed.lines} lines)")
    if record.epoch_s:
        found.append(f"{statistics.median_low(record.epoch_s.values()):.2f} s/epoch")
    if record.curve:
        found.append(f"accuracy {record.curve[-1][1]:.4f} after {record.curve[-1][0]:.1f} s")
    elif record.validation_accuracy:
        last = max(record.validation_accuracy)
        found.append(f"accuracy {record.validation_accuracy[last]:.4f} after {last + 1} epochs")
    return f"{record.name}: {', '.join(found)}, {record.wall_s:.0f} s in total"


def print_progress(line: str) -> None:
    """Print to stderr, so that stdout contains only the tables."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
