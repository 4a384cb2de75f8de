"""`echelon bench pushpull`: a whole step of a parameter server, beside its peers, in one run.

A step is the push of every gradient, their sum, SGD with momentum and weight decay on the servers, and the pull of
every weight; it is timed on one worker, from before the first push until the last weight is there, while all workers
step together. Only what the command line needs is imported at the top, so that other commands start quickly.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.errors import UsageError

if TYPE_CHECKING:
    from echelon.bench.harness.alternate import Contender

PEERS = ("gloo", "mxnet", "mxnet_tuned", "echelon_copy")
TRANSPORTS = ("auto", "shm", "tcp")
SETTINGS = ("model", "num_workers", "num_servers", "kv_store", "transport", "rounds", "steps", "warmup")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `pushpull` to the benchmarks."""
    parser = subparsers.add_parser("pushpull", help="time push, sum, SGD and pull of a model's tensors, beside peers")
    parser.add_argument("--model", default="resnet50", help="whose tensors: a model, keys:N or keys:N:SIZE")
    parser.add_argument("-n", "--num-workers", type=int, default=2)
    parser.add_argument("-s", "--num-servers", type=int, default=2)
    parser.add_argument("--kv-store", default="dist_sync")
    parser.add_argument(
        "--transport", choices=TRANSPORTS, default="auto", help="Echelon's way; tcp holds MXNet to TCP too"
    )
    parser.add_argument("--peer", action="append", choices=PEERS, default=[], help="run it too; repeat for more")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each contender")
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
    with tempfile.TemporaryDirectory(prefix="echelon-bench-") as folder:
        compete(make_contenders(args, Path(folder)), args)
    return 0


def make_contenders(args: argparse.Namespace, folder: Path) -> list[Contender]:
    """Echelon first, because ratios are taken against the first; then the peers asked for. None is started yet."""
    from echelon.bench.pushpull import contenders
    from echelon.bench.pushpull.shapes import shapes, write_shapes

    shapes_file = folder / "shapes.json"
    write_shapes(shapes_file, shapes(args.model))
    plan = contenders.Plan(shapes_file, folder, args.num_workers, args.num_servers, args.kv_store, args.transport)
    return [contenders.MAKERS[name](plan) for name in ("echelon", *args.peer)]


def compete(contenders: Sequence[Contender], args: argparse.Namespace) -> None:
    """Start them, let them take turns, show and write the figures, stop them."""
    from echelon.bench.harness.alternate import alternate, ratios, summarise
    from echelon.bench.harness.results import print_table, write_json

    with ExitStack() as running:
        for contender in contenders:
            running.enter_context(contender)
        cases = summarise(alternate(contenders, args.rounds, args.steps, args.warmup))
        print_table(title(args), cases, ratios(cases))
        if args.json is not None:
            write_json(args.json, cases, ratios(cases), {name: getattr(args, name) for name in SETTINGS})


def title(args: argparse.Namespace) -> str:
    """What was measured, in a line."""
    from echelon.bench.pushpull.shapes import num_elements, shapes

    tensors = shapes(args.model)
    size = f"{len(tensors)} tensors, {num_elements(tensors) * 4 / 1e6:.4g} MB"
    return f"pushpull {args.model}: {size}, -n {args.num_workers} -s {args.num_servers}, {args.kv_store}"
