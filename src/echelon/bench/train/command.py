"""`echelon bench train`: samples a second of whole training steps, beside peers, in one run.

A step is forward, backward, exchange and SGD with momentum and weight decay on a batch in memory. Workers step together
and each times its own steps; the rate is that of all workers. A loss that did not go down is an error: speed without
learning counts nothing. Only what the command line needs is imported at the top, so that other commands start quickly.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.bench.train.workloads import WORKLOADS
from echelon.errors import JobError, UsageError
from echelon.system import usable_cores

if TYPE_CHECKING:
    from rich.console import Console

    from echelon.bench.harness.alternate import Case, Ratio
    from echelon.bench.train.contenders import TrainContender

PEERS = ("ddp", "ddp_tuned", "mxnet", "gradients")
STORES = ("dist_sync", "dist_async", "dist_ssync")
TRANSPORTS = ("auto", "shm", "tcp")
SETTINGS = (
    "model",
    "batch_size",
    "threads",
    "num_workers",
    "num_servers",
    "kv_store",
    "transport",
    "rounds",
    "steps",
    "warmup",
)
COMPARED = 5  # losses at either end of a run, at most, whose means are compared: single ones may jump


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `train` to the benchmarks."""
    parser = subparsers.add_parser("train", help="samples a second of whole training steps, beside peers")
    parser.add_argument("--model", choices=WORKLOADS, default="resnet20", help="what to train")
    parser.add_argument("-n", "--num-workers", type=int, default=2)
    parser.add_argument("-s", "--num-servers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, help="of a worker; 128 for resnet20, 32 for mlp25m if not given")
    parser.add_argument("--threads", type=int, help="of a worker; if not given, the cores divided by the workers")
    parser.add_argument("--kv-store", choices=STORES, default="dist_sync")
    parser.add_argument("--transport", choices=TRANSPORTS, default="auto", help="Echelon's way")
    parser.add_argument(
        "--peer",
        action="append",
        choices=PEERS,
        default=[],
        help="run it too; repeat for more (gradients: Echelon without --push-factors)",
    )
    parser.add_argument("--rounds", type=int, default=8, help="turns of each contender")
    parser.add_argument("--steps", type=int, default=10, help="timed steps in a turn")
    parser.add_argument("--warmup", type=int, default=2, help="steps before those, in each turn")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark that the command line describes."""
    if args.num_workers < 1 or args.num_servers < 1:
        raise UsageError(f"needs at least one worker and one server; got -n {args.num_workers} -s {args.num_servers}")
    if len(set(args.peer)) < len(args.peer):
        raise UsageError(f"each --peer once; got {', '.join(args.peer)}")
    fill_in(args)
    if args.batch_size < 1 or args.threads < 1:
        raise UsageError(f"needs a batch and threads of at least 1; got {args.batch_size} and {args.threads}")
    with tempfile.TemporaryDirectory(prefix="echelon-bench-") as folder:
        compete(make_contenders(args, Path(folder)), args)
    return 0


def fill_in(args: argparse.Namespace) -> None:
    """What was not said: the model's own batch, and an equal share of the cores."""
    if args.batch_size is None:
        args.batch_size = WORKLOADS[args.model].batch_size
    if args.threads is None:
        args.threads = max(1, usable_cores() // args.num_workers)


def make_contenders(args: argparse.Namespace, folder: Path) -> list[TrainContender]:
    """Echelon first, because ratios are taken against the first; then the peers asked for. None is started yet."""
    from echelon.bench.train.contenders import MAKERS, TrainPlan

    plan = TrainPlan(
        model=args.model,
        batch_size=args.batch_size,
        threads=args.threads,
        work_dir=folder,
        num_workers=args.num_workers,
        num_servers=args.num_servers,
        kv_store=args.kv_store,
        transport=args.transport,
    )
    return [MAKERS[name](plan) for name in ("echelon", *args.peer)]


def compete(contenders: Sequence[TrainContender], args: argparse.Namespace) -> None:
    """Start them, let them take turns, show and write the figures, stop them."""
    from echelon.bench.harness.alternate import alternate, ratios, summarise
    from echelon.bench.harness.results import figures, write_body

    with ExitStack() as running:
        for contender in contenders:
            running.enter_context(contender)
        cases = summarise(alternate(contenders, args.rounds, args.steps, args.warmup))
    samples = args.batch_size * args.num_workers
    losses = {contender.name: contender.losses for contender in contenders}
    print_rates(title(args), cases, ratios(cases), samples, losses)
    if args.json is not None:
        rates = {case.name: round(samples / case.median_ms * 1e3, 2) for case in cases}
        settings = {name: getattr(args, name) for name in SETTINGS}
        ends = {name: [values[0], values[-1]] for name, values in losses.items()}
        body = {"settings": settings, "samples_per_s": rates, "losses": ends, **figures(cases, ratios(cases))}
        write_body(args.json, body)
    check_learning(losses)


def title(args: argparse.Namespace) -> str:
    """What was measured, in a line."""
    job = f"-n {args.num_workers} -s {args.num_servers}, {args.kv_store}"
    return f"train {args.model}: batch {args.batch_size} and {args.threads} threads a worker, {job}"


def print_rates(
    title: str,
    cases: Sequence[Case],
    ratios: Sequence[Ratio],
    samples: int,
    losses: dict[str, list[float]],
    console: Console | None = None,
) -> None:
    """A row a contender: samples/s of all workers at the median step, and between slow and fast ones (p90, p10)."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("case")
    for heading in ("samples/s", "slow – fast", "loss", "ratio", "over rounds"):
        table.add_column(heading, justify="right")
    by_name = {ratio.name: ratio for ratio in ratios}
    for case in cases:
        ratio = by_name.get(f"{cases[0].name}_vs_{case.name}")
        compared = ("", "") if ratio is None else (f"{ratio.value:.2f} ×", f"{ratio.low:.2f} – {ratio.high:.2f}")
        slow, median, fast = (samples / ms * 1e3 for ms in (case.p90_ms, case.median_ms, case.p10_ms))
        loss = f"{losses[case.name][0]:.3f} → {losses[case.name][-1]:.3f}"
        table.add_row(case.name, f"{median:.0f}", f"{slow:.0f} – {fast:.0f}", loss, *compared)
    (console or Console()).print(table)


def check_learning(losses: dict[str, list[float]]) -> None:
    """Every contender's loss went down, or none of its figures count."""
    for name, values in losses.items():
        some = max(1, min(COMPARED, len(values) // 2))
        first, last = (sum(part) / some for part in (values[:some], values[-some:]))
        if not last < first:
            raise JobError(
                f"{name} did not learn: its loss went from {first:.4f} to {last:.4f} in {len(values)} steps; "
                "its rate counts nothing"
            )
