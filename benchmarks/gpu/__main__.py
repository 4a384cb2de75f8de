"""`python -m benchmarks.gpu`: every figure that is wanted of one GPU, by running the training commands that give it.

Rows are run as processes (`gpu_run`), their logs read (`gpu_log`), records kept (`gpu_results`) and shown beside the
published figures (`gpu_tables`). Only what the command line needs is imported at the top, so that other commands start
quickly.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu.rows import LISTS, Row, choose
from echelon.errors import EchelonError
from echelon.system import raised_by_sigterm

if TYPE_CHECKING:
    from benchmarks.gpu.results import Origin, Record

ROOT = Path(__file__).resolve().parents[2]


def make_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(
        "benchmarks.gpu", description="Speed and accuracy of the training commands on one GPU."
    )
    add = parser.add_argument
    add("--list", choices=LISTS, default="gpu", help="which rows there are; tiny: seconds on a CPU, to try this out")
    add("--only", nargs="+", default=[], metavar="ROW", help="speed, accuracy, or names of rows")
    add("--show", action="store_true", help="print the names and commands of the rows; run nothing")
    add("--jobs", type=int, default=1, help="accuracy rows at a time; speed rows always run alone, and first")
    add("--budget-s", type=float, default=float("inf"), metavar="S", help="start no row after so many seconds")
    add("--limit-s", type=float, default=1800.0, metavar="S", help="end a row that runs longer")
    add("--data-dir", metavar="DIR", help="given to every trainer that reads data")
    add("--data-note", default="not noted", metavar="TEXT", help="where the data came from, for the record")
    add("--extra", default="", metavar="FLAGS", help="added to every trainer: --extra='--wd 0.0001'")
    add("--commit", help="of this code, for the record, where there is no git to ask")
    add("--examples", type=Path, default=ROOT / "examples" / "image-classification", metavar="DIR")
    add("--log-dir", type=Path, metavar="DIR", help="keep every row's log there")
    add("--json", type=Path, default=ROOT / "benchmarks" / "results" / "gpu.json", metavar="FILE")
    add("--keep", action="store_true", help="keep the rows that FILE has, but for those that are run anew")
    add("--missing", action="store_true", help="run only what no gpu*.json beside FILE has; implies --keep")
    add("--tables", action="store_true", help="run nothing; show what the gpu*.json beside FILE have")
    add("--docs", type=Path, metavar="FILE", help="put the tables of all gpu*.json into that document")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    try:
        return run(make_parser().parse_args(arguments))
    except EchelonError as error:
        print(f"benchmarks.gpu: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def run(args: argparse.Namespace) -> int:
    """Run what is asked for, show it, write it down."""
    rows = choose(LISTS[args.list](), args.only)
    if args.show:
        return show(rows, args.extra)
    if args.tables:
        return report(args, None)
    with raised_by_sigterm(KeyboardInterrupt), tempfile.TemporaryDirectory(prefix="echelon-gpu-") as folder:
        return measure(args, rows, args.log_dir or Path(folder))


def show(rows: list[Row], extra: str) -> int:
    """What would be run."""
    from benchmarks.gpu.run import shown_command

    for row in rows:
        print(f"{row.name:<28} {row.kind:<9} {shown_command(row, extra)}")
    return 0


def measure(args: argparse.Namespace, rows: list[Row], log_dir: Path) -> int:
    """Run the rows, writing each down as it ends. The status says whether all of them have figures."""
    from benchmarks.gpu.results import better, read_folder, read_records, write_records
    from benchmarks.gpu.run import Plan, Runner

    records = read_records(args.json) if args.keep or args.missing else {}
    if args.missing:
        there = {name for name, record in read_folder(args.json.parent).items() if not record.error}
        rows = [row for row in rows if row.name not in there]
    if not rows:
        return report(args, records)
    failed: list[str] = []
    command = command_line(args)

    def done(record: Record) -> None:
        records[record.name] = better(records.get(record.name), record)
        write_records(args.json, records.values(), command)
        failed.extend([record.name] if record.error else [])
        say(outcome(record))

    plan = Plan(
        examples=args.examples,
        log_dir=log_dir,
        origin=find_origin(args),
        data_dir=args.data_dir,
        jobs=args.jobs,
        budget_s=args.budget_s,
        limit_s=args.limit_s,
    )
    missing = Runner(plan, done, say).run(rows)
    report(args, records)
    if missing:
        say(f"not run, the budget of {args.budget_s:g} s is spent: {' '.join(row.name for row in missing)}")
    return 1 if failed or missing else 0


def report(args: argparse.Namespace, records: dict[str, Record] | None) -> int:
    """Show the tables of these records, or of all there are; the document always gets all."""
    from benchmarks.gpu.results import read_folder
    from benchmarks.gpu.tables import markdown, rewrite_block

    rows = LISTS[args.list]()
    every = read_folder(args.json.parent)
    print(markdown(rows, every if records is None else records))
    if args.docs is not None:
        text = args.docs.read_text(encoding="utf-8")
        args.docs.write_text(rewrite_block(text, markdown(rows, every)), encoding="utf-8")
    return 0


def find_origin(args: argparse.Namespace) -> Origin:
    """What all records of this go have in common."""
    from benchmarks.gpu.results import Origin, describe_gpu
    from echelon.bench.harness.results import commit

    gpu, torch_version = describe_gpu()
    return Origin(args.commit or commit(), gpu, torch_version, args.data_note, args.extra)


def command_line(args: argparse.Namespace) -> str:
    """This command without the machine's folders."""
    words = ["echelon", "bench", "gpu", "--list", args.list, "--jobs", str(args.jobs)]
    words += ["--only", *args.only] if args.only else []
    words += ["--data-dir", "DIR"] if args.data_dir else []
    words += [f"--extra={args.extra}"] if args.extra else []
    return shlex.join(words)


def outcome(record: Record) -> str:
    """One line about a finished row."""
    if record.error:
        return f"{record.name}: FAILED after {record.wall_s:.0f} s: {record.error}"
    found = []
    if record.kind == "speed" and (speed := record.speed) is not None:
        found.append(f"{speed.median:,.0f} samples/s ({speed.p10:,.0f} – {speed.p90:,.0f}, {speed.lines} lines)")
    if record.validation_accuracy:
        last = max(record.validation_accuracy)
        found.append(f"accuracy {record.validation_accuracy[last]:.4f} after {last + 1} epochs")
    return f"{record.name}: {', '.join(found)}, {record.wall_s:.0f} s in all"


def say(line: str) -> None:
    """Progress goes to stderr, so that the tables can be taken from stdout."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
