"""`echelon bench`: one sub-command a benchmark. Each module adds its own parser; this file only knows their names."""

from __future__ import annotations

import argparse
from importlib import import_module
from importlib.util import find_spec

BENCHMARKS = (
    "echelon.bench.pushpull.command",
    "echelon.bench.train.command",
    "echelon.bench.costs",
    "echelon.bench.schemes",
    "echelon.bench.io.command",
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `bench` with the benchmarks this version has."""
    parser = subparsers.add_parser("bench", help="measure Echelon, and its peers beside it")
    benchmarks = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    for name in BENCHMARKS:
        if find_spec(name) is not None:
            import_module(name).add_parser(benchmarks)
