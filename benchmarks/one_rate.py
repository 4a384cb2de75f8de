"""`python -m benchmarks.one_rate`: the accuracy of the training commands under the four schemes, at one learning rate.

Each row is a command of the examples with its own --lr; each column a scheme; 2 to 8 workers. Accuracies do not depend
on the speed of the machine, but the staleness of dist_async does, so a record says what the machine was.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from echelon.bench.harness.results import write_result

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "image-classification"
_LAUNCH = "launch -n {n} -s 2 {python}"
COMMANDS = {  # arguments of `echelon`
    "digits": "train -n {n} -s 2 --num-epochs 8",
    "mnist mlp": f"{_LAUNCH} train_mnist.py --num-epochs 4 --data-dir {{data}}",
    "mnist dist_sync_mlp.py": f"{_LAUNCH} dist_sync_mlp.py --num-epochs 4 --data-dir {{data}}",
    "cifar10 resnet-20": f"{_LAUNCH} train_cifar10.py --network resnet --num-layers 20 --num-epochs 6 "
    "--data-dir {data}",
}
KINDS = tuple(dict.fromkeys(name.split()[0] for name in COMMANDS))
SCHEMES = {
    "dist_sync": "--kv-store dist_sync",
    "dist_async": "--kv-store dist_async",
    "dist_ssync (3)": "--kv-store dist_ssync --staleness 3",
    "dist_gsync (2 groups)": "--kv-store dist_gsync --groups {groups}",
}
_ACCURACY = re.compile(r"Validation-accuracy=([\d.]+)|^accuracy +([\d.]+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Cell:
    """One run: its accuracy, or None with the last lines of its log."""

    command: str
    scheme: str
    workers: int
    accuracy: float | None
    log: str = ""


def run_cell(name: str, scheme: str, workers: int, args: argparse.Namespace) -> Cell:
    """Run one command under one scheme, and read the last validation accuracy from its log."""
    line = f"{COMMANDS[name]} {SCHEMES[scheme]} {dict(args.extra).get(name.split()[0], '')}"
    values = {"n": workers, "python": sys.executable, "data": args.data_dir.resolve(), "groups": _halves(workers)}
    words = shlex.split(line.format(**values))
    with tempfile.TemporaryDirectory(prefix="one-rate-") as folder:
        command = [
            sys.executable,
            "-m",
            "echelon",
            *(str(EXAMPLES / word) if word.endswith(".py") else word for word in words),
        ]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    found = [plain or summary for plain, summary in _ACCURACY.findall(output)]
    if done.returncode or not found:
        return Cell(name, scheme, workers, None, output[-2000:])
    return Cell(name, scheme, workers, float(found[-1]))


def _halves(workers: int) -> str:
    """Return two groups of ranks, such as 0,1/2,3."""
    middle = workers // 2
    return "/".join(",".join(map(str, ranks)) for ranks in (range(middle), range(middle, workers)))


def markdown(cells: Sequence[Cell]) -> str:
    """Return one row per command and number of workers."""
    lines = [f"| command | workers | {' | '.join(f'`{s}`' for s in SCHEMES)} |", "|---|---|" + "---|" * len(SCHEMES)]
    for name, workers in dict.fromkeys((cell.command, cell.workers) for cell in cells):
        row = {cell.scheme: cell.accuracy for cell in cells if (cell.command, cell.workers) == (name, workers)}
        shown = (f"{row[s]:.4f}" if row.get(s) is not None else "–" for s in SCHEMES)
        lines.append(f"| {name} | {workers} | {' | '.join(shown)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the chosen cells and print the table."""
    parser = argparse.ArgumentParser("benchmarks.one_rate", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=COMMANDS, default=list(COMMANDS), metavar="ROW")
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 4, 8], metavar="N")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time (%(default)s)")
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="folder of MNIST's and CIFAR-10's files")
    parser.add_argument(
        "--extra",
        action="append",
        type=_kind_and_flags,
        default=[],
        metavar="KIND=FLAGS",
        help="flags for one kind of row, such as cifar10='--gpus 0'; repeatable",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the cells to a file")
    args = parser.parse_args(argv)
    cases = [(name, scheme, workers) for name in args.only for workers in args.workers for scheme in SCHEMES]
    cells: list[Cell] = []
    with ThreadPoolExecutor(args.jobs) as pool:
        for cell in pool.map(lambda case: run_cell(case[0], case[1], case[2], args), cases):
            cells.append(cell)
            print(f"{len(cells)}/{len(cases)}  {cell.command}, {cell.workers} workers, {cell.scheme}: {cell.accuracy}")
            if cell.accuracy is None:
                print(cell.log)
            if args.json is not None:
                write_result(args.json, {"cells": [asdict(cell) for cell in cells]})
    print(markdown(cells))
    return int(any(cell.accuracy is None for cell in cells))


def _kind_and_flags(text: str) -> tuple[str, str]:
    kind, _, flags = text.partition("=")
    if kind not in KINDS or not flags:
        raise argparse.ArgumentTypeError(f"{text!r} is not KIND=FLAGS, where KIND is one of {', '.join(KINDS)}")
    return kind, flags


if __name__ == "__main__":
    sys.exit(main())
