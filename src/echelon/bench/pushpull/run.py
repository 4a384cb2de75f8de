"""`echelon bench pushpull`: one step of a parameter server, measured beside its peers.

A step pushes every gradient, sums them, applies SGD with momentum and weight decay on the servers, and pulls every
weight. All workers step together. One of them times the step, from before the first push until it has every weight.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from echelon.bench.harness.job import JOB_FLAGS, check_job, job_fields
from echelon.bench.harness.results import figures, print_times, write_result
from echelon.bench.harness.turns import Contender, measure
from echelon.bench.pushpull.contenders import PEERS, PushPullPlan, echelon
from echelon.bench.pushpull.shapes import num_elements, shapes

SETTINGS = ("model", *JOB_FLAGS, "hosts", "rounds", "steps", "warmup")


def run(args: argparse.Namespace) -> int:
    """Run the benchmark that the command line describes."""
    check_job(args)
    with tempfile.TemporaryDirectory(prefix="echelon-bench-") as folder:
        compare(make_contenders(args, Path(folder)), args)
    return 0


def make_contenders(args: argparse.Namespace, folder: Path) -> list[Contender]:
    """Return Echelon, which ratios refer to, and the requested peers. None of them is started yet."""
    shapes(args.model)  # report an unknown model before anything starts
    plan = PushPullPlan(model=args.model, **job_fields(args, folder))
    return [echelon(plan), *(PEERS[name](plan) for name in args.peer)]


def compare(contenders: Sequence[Contender], args: argparse.Namespace) -> None:
    """Measure the contenders in turns, print the table and write the result file."""
    cases = measure(contenders, args.rounds, args.steps, args.warmup)
    print_times(title(args), cases)
    if args.hosts:
        for case in cases:
            rate = moved_bytes(args) / case.median_ms / 1e6
            print(f"{case.name}: {rate:.3f} GB/s between the hosts, both directions together")
    if args.json is not None:
        settings = {name: getattr(args, name) for name in SETTINGS}
        write_result(args.json, {"settings": settings, **figures(cases)})


def moved_bytes(args: argparse.Namespace) -> int:
    """Return the bytes that go between the hosts in a step."""
    return PushPullPlan(model=args.model, **job_fields(args, Path())).bytes_between_hosts


def title(args: argparse.Namespace) -> str:
    """Return one line that describes the measurement."""
    tensors = shapes(args.model)
    size = f"{len(tensors)} tensors, {num_elements(tensors) * 4 / 1e6:.4g} MB"
    return f"pushpull {args.model}: {size}, -n {args.num_workers} -s {args.num_servers}, {args.kv_store}"
