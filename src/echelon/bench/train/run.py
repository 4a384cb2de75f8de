"""`echelon bench train`: samples per second of whole training steps, measured beside peers.

A step is forward, backward, exchange of gradients and SGD with momentum and weight decay, on a batch in memory. All
workers step together and each times its own steps; the rate is that of all workers together. If a contender's loss does
not decrease, the benchmark fails, because the speed of a training that does not learn has no meaning.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from echelon.bench.harness.checks import check_numbers
from echelon.bench.harness.job import JOB_FLAGS, check_job, job_fields
from echelon.bench.harness.results import figures, print_cases, write_result
from echelon.bench.harness.turns import Case, measure
from echelon.bench.train.contenders import PEERS, TrainContender, TrainPlan, echelon
from echelon.bench.train.workloads import WORKLOADS
from echelon.errors import JobError, UsageError
from echelon.system import usable_cores

SETTINGS = ("model", "batch_size", "threads", *JOB_FLAGS, "rounds", "steps", "warmup")
MOST_COMPARED = 5  # compare the means of up to this many first and last losses, because single losses fluctuate


def run(args: argparse.Namespace) -> int:
    """Run the benchmark that the command line describes."""
    check_job(args)
    fill_in(args)
    check_numbers(args, batch_size=1, threads=1)
    if args.model == "gpt" and "mxnet" in (args.peer or ()):
        raise UsageError("--peer mxnet does not have the model gpt; use --model resnet20 or mlp25m")
    with tempfile.TemporaryDirectory(prefix="echelon-bench-") as folder:
        compare(make_contenders(args, Path(folder)), args)
    return 0


def fill_in(args: argparse.Namespace) -> None:
    """Set the flags that were not given: the model's batch size, and an equal share of the cores per worker."""
    if args.batch_size is None:
        args.batch_size = WORKLOADS[args.model].batch_size
    if args.threads is None:
        args.threads = max(1, usable_cores() // args.num_workers)


def make_contenders(args: argparse.Namespace, folder: Path) -> list[TrainContender]:
    """Return Echelon, which ratios refer to, and the requested peers. None of them is started yet."""
    job = job_fields(args, folder)
    plan = TrainPlan(model=args.model, batch_size=args.batch_size, threads=args.threads, **job)
    return [echelon(plan), *(PEERS[name](plan) for name in args.peer)]


def compare(contenders: Sequence[TrainContender], args: argparse.Namespace) -> None:
    """Measure the contenders in turns, print the table, write the result file and check the losses."""
    cases = measure(contenders, args.rounds, args.steps, args.warmup)
    samples = args.batch_size * args.num_workers
    losses = {contender.name: contender.losses for contender in contenders}
    print_rates(title(args), cases, samples, losses)
    if args.json is not None:
        body = {
            "settings": {name: getattr(args, name) for name in SETTINGS},
            "samples_per_s": {case.name: round(samples / case.median_ms * 1e3, 2) for case in cases},
            "losses": {name: [values[0], values[-1]] for name, values in losses.items()},
            **figures(cases),
        }
        write_result(args.json, body)
    check_learning(losses)


def title(args: argparse.Namespace) -> str:
    """Return one line that describes the measurement."""
    job = f"-n {args.num_workers} -s {args.num_servers}, {args.kv_store}"
    return f"train {args.model}: batch {args.batch_size} and {args.threads} threads per worker, {job}"


def print_rates(title: str, cases: Sequence[Case], samples: int, losses: Mapping[str, Sequence[float]]) -> None:
    """Print one row per contender: samples/s of all workers at the median step and at slow and fast ones (p90, p10)."""

    def cells(case: Case) -> list[str]:
        slow, median, fast = (samples / ms * 1e3 for ms in (case.p90_ms, case.median_ms, case.p10_ms))
        loss = f"{losses[case.name][0]:.3f} → {losses[case.name][-1]:.3f}"
        return [f"{median:.0f}", f"{slow:.0f} – {fast:.0f}", loss]

    print_cases(title, cases, ("samples/s", "slow – fast", "loss"), cells)


def check_learning(losses: Mapping[str, Sequence[float]]) -> None:
    """Raise JobError if the loss of a contender did not decrease."""
    for name, values in losses.items():
        some = max(1, min(MOST_COMPARED, len(values) // 2))
        first, last = (sum(part) / some for part in (values[:some], values[-some:]))
        if not last < first:
            raise JobError(
                f"{name} did not learn: its loss went from {first:.4f} to {last:.4f} in {len(values)} steps; "
                "its rate is not valid"
            )
