"""The flags of every benchmark: one function per `echelon bench NAME`.

A benchmark's own module is imported only when the benchmark starts, because it may import torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable
from importlib import import_module
from pathlib import Path
from typing import TypeAlias

from echelon.bench.dlbs.flags import add_harness
from echelon.bench.io import contenders as io
from echelon.bench.pushpull import contenders as pushpull
from echelon.bench.schemes import cases as schemes
from echelon.bench.train import contenders as train
from echelon.bench.train.workloads import WORKLOADS
from echelon.system import raised_by_sigterm

Benchmarks: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

SECURITY = ("auto", "proof", "none")
TRANSPORTS = ("auto", "shm", "tcp")
PEERS_OF_TRAIN = (
    " (gradients: Echelon without --push-factors; lazy: Echelon with lazy_pull; clipped, ddp_clipped: with clipping by "
    "the global norm)"
)
LOAD_STORES = ("dist_sync", "dist_async", "dist_ssync", "dist_gsync")
TRAIN_STORES = ("dist_sync", "dist_async", "dist_ssync")


def add_benchmarks(benchmarks: Benchmarks) -> None:
    """Add the parser of every benchmark."""
    add_pushpull(benchmarks)
    add_train(benchmarks)
    add_costs(benchmarks)
    add_schemes(benchmarks)
    add_io(benchmarks)
    add_rows(benchmarks)
    add_load(benchmarks)
    add_large(benchmarks)
    add_checkpoint(benchmarks)
    add_harness(benchmarks)


def add_pushpull(benchmarks: Benchmarks) -> None:
    """Add `echelon bench pushpull`."""
    parser = benchmarks.add_parser("pushpull", help="time push, sum, SGD and pull of a model's tensors")
    add = parser.add_argument
    add("--model", default="resnet50", help="the tensors to move: a model's name, keys:N or keys:N:SIZE")
    _add_job(parser, stores=None, transport_help="Echelon's transport; with tcp, MXNet uses TCP too")
    _add_turns(parser, pushpull.PEERS, rounds=10, steps=10, warmup=2)
    _finish(parser, "echelon.bench.pushpull.run")


def add_train(benchmarks: Benchmarks) -> None:
    """Add `echelon bench train`."""
    parser = benchmarks.add_parser("train", help="measure samples per second of whole training steps")
    add = parser.add_argument
    add("--model", choices=WORKLOADS, default="resnet20", help="the network to train")
    _add_job(parser, stores=TRAIN_STORES, transport_help="Echelon's transport")
    sizes = ", ".join(f"{workload.batch_size} for {name}" for name, workload in WORKLOADS.items())
    add("--batch-size", type=int, help=f"samples per worker and step (default: {sizes})")
    add("--threads", type=int, help="threads per worker (default: the number of cores divided by the workers)")
    _add_turns(parser, train.PEERS, rounds=8, steps=10, warmup=2, note=PEERS_OF_TRAIN)
    _finish(parser, "echelon.bench.train.run")


def add_costs(benchmarks: Benchmarks) -> None:
    """Add `echelon bench costs`."""
    parser = benchmarks.add_parser("costs", help="measure start-up time, latency, cost per key and memory")
    add = parser.add_argument
    add("--starts", type=int, default=5, help="jobs to start to measure the time to the first step")
    add("--rounds", type=int, default=5, help="rounds per number of keys")
    add("--steps", type=int, default=20, help="timed steps per round")
    add("--model", default="resnet50", help="the model whose memory is measured")
    _finish(parser, "echelon.bench.costs")


def add_schemes(benchmarks: Benchmarks) -> None:
    """Add `echelon bench schemes`."""
    parser = benchmarks.add_parser("schemes", help="measure the time to an accuracy on digits: BSP, ASP, SSP and GSP")
    add = parser.add_argument
    add("--target", type=float, default=0.95, help="validation accuracy to reach")
    add("--seeds", type=int, default=5, help="runs per case and scheme, each with another seed")
    add("--pace", type=float, default=0.05, help="seconds per step")
    add("--lr", type=float, default=0.02, help="learning rate of all schemes")
    add("--batch-size", type=int, default=16, help="samples per worker and step")
    add("--limit-epochs", type=int, default=20, help="stop a run after this many epochs")
    listed = "; ".join(f"{name}: {case.title}" for name, case in schemes.CASES.items())
    add(
        "--case",
        action="append",
        choices=schemes.CASES,
        metavar="NAME",
        help=f"measure only this case; repeatable ({listed})",
    )
    add("--slow-link", default="5mbit", metavar="RATE", help="rate of the slow link, as tc writes it; needs root")
    add("--plot", type=Path, metavar="FILE", help="draw the accuracy curves to this PNG file")
    _finish(parser, "echelon.bench.schemes.run")


def add_io(benchmarks: Benchmarks) -> None:
    """Add `echelon bench io`."""
    parser = benchmarks.add_parser("io", help="measure images per second from record files to augmented batches")
    add = parser.add_argument
    add("--rec", metavar="FILE", help="record file of images (default: generate one for the run)")
    add("--images", type=int, default=1000, metavar="N", help="images in the generated file")
    add(
        "--restart-interval",
        type=int,
        default=4,
        metavar="N",
        help="restart interval of the generated JPEGs, as in `echelon data im2rec`",
    )
    add("--batch-size", type=int, default=64, help="images per batch")
    add("--threads", type=int, default=2, help="decoding processes of Echelon, decoding threads of MXNet")
    add("--step-batches", type=int, default=4, metavar="N", help="batches per step")
    _add_turns(parser, io.PEERS, rounds=6, steps=6, warmup=6)
    add("--cached", action="store_true", help="also measure images per second of a CIFAR-sized set kept decoded")
    add("--memory", action="store_true", help="also measure how much memory grows over a run ten times as long")
    add("--device", metavar="NAME", help="also compare and time batches on a device: cuda:0 or cpu")
    _finish(parser, "echelon.bench.io.run")


def add_rows(benchmarks: Benchmarks) -> None:
    """Add `echelon bench rows`."""
    parser = benchmarks.add_parser("rows", help="count the bytes of a step of a table with sparse gradients")
    add = parser.add_argument
    add("--rows", type=int, default=1_000_000, help="rows of the table")
    add("--width", type=int, default=64, help="elements per row")
    add("--optimizer", choices=("sgd", "adagrad", "sparseadam"), default="adagrad", help="optimizer of the servers")
    add("-n", "--num-workers", type=int, default=2, help="number of workers")
    add("-s", "--num-servers", type=int, default=2, help="number of servers")
    add("--steps", type=int, default=10, help="timed steps per number of touched rows")
    _finish(parser, "echelon.bench.rows")


def add_load(benchmarks: Benchmarks) -> None:
    """Add `echelon bench load`."""
    parser = benchmarks.add_parser("load", help="run many processes of a small model: progress, rates and memory")
    add = parser.add_argument
    add("-n", "--workers", dest="num_workers", type=int, default=64, help="number of workers")
    add("-s", "--servers", dest="num_servers", type=int, default=8, help="number of servers")
    add("--minutes", type=float, default=10.0, help="minutes of training per scheme")
    stores = ", ".join(LOAD_STORES)
    only = f"only one of {stores}; repeatable (default: all four)"
    add("--kv-store", action="append", choices=LOAD_STORES, metavar="STORE", help=only)
    add("--width", type=int, default=128, help="units of the two hidden layers")
    add("--transport", choices=TRANSPORTS, default="auto", help="transport between workers and servers")
    _finish(parser, "echelon.bench.load.run")


def add_large(benchmarks: Benchmarks) -> None:
    """Add `echelon bench large`."""
    parser = benchmarks.add_parser("large", help="measure rates and peak memory of a 2 GB model and of 10,000 keys")
    add = parser.add_argument
    add("--model", action="append", help="the tensors to move, as in pushpull; repeatable")
    add("--kv-store", action="append", help="measure only this store; repeatable (default: dist_sync and dist_async)")
    add("-n", "--num-workers", type=int, default=2, help="number of workers")
    add("-s", "--num-servers", type=int, default=2, help="number of servers")
    add("--steps", type=int, default=4, help="steps per job; the first is not counted")
    _finish(parser, "echelon.bench.large")


def add_checkpoint(benchmarks: Benchmarks) -> None:
    """Add `echelon bench checkpoint`."""
    parser = benchmarks.add_parser("checkpoint", help="compare the times of steps with and without saving")
    add = parser.add_argument
    add("--width", type=int, default=1500, help="width of the network's layers")
    add("--batch-size", type=int, default=64, help="samples per step")
    add("--rounds", type=int, default=12, help="blocks of steps of each kind, in changing order")
    add("--steps", type=int, default=20, help="steps per block; a block that saves does so before its first step")
    _finish(parser, "echelon.bench.checkpoint")


def _add_job(parser: argparse.ArgumentParser, stores: Iterable[str] | None, transport_help: str) -> None:
    """Add the flags that describe a job of workers and servers."""
    add = parser.add_argument
    add("-n", "--num-workers", type=int, default=2, help="number of workers")
    add("-s", "--num-servers", type=int, default=2, help="number of servers")
    add("--kv-store", choices=stores, default="dist_sync", help="store of Echelon and MXNet")
    add("--transport", choices=TRANSPORTS, default="auto", help=transport_help)
    add("--security", choices=SECURITY, default="auto", help="of Echelon between hosts: TLS, proof only, or none")
    add("--hosts", metavar="A,B", help="run servers, then workers, on these hosts in turn, over ssh")
    add("-i", "--interface", default="eth0", help="network interface of the hosts")
    add("--ssh-config", metavar="FILE", help="configuration file of ssh")


def _add_turns(
    parser: argparse.ArgumentParser, peers: Collection[str], rounds: int, steps: int, warmup: int, note: str = ""
) -> None:
    """Add the flags of a benchmark whose contenders take turns."""
    add = parser.add_argument
    listed = ", ".join(peers)
    text = f"also measure this contender; repeatable: {listed}{note}"
    add("--peer", action="append", choices=peers, default=[], metavar="NAME", help=text)
    add("--rounds", type=int, default=rounds, help="turns per contender")
    add("--steps", type=int, default=steps, help="timed steps per turn")
    add("--warmup", type=int, default=warmup, help="untimed steps at the start of each turn")


def _finish(parser: argparse.ArgumentParser, module: str) -> None:
    """Add `--json`, and have the parsed flags carry a function that imports the module and calls its `run`."""

    def run(args: argparse.Namespace) -> int:
        start: Callable[[argparse.Namespace], int] = import_module(module).run
        with raised_by_sigterm(KeyboardInterrupt):  # processes and temporary folders must not stay behind
            return start(args)

    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
    parser.set_defaults(run=run)
