"""`echelon bench`: one sub-command per benchmark."""

from __future__ import annotations

import argparse

from echelon.bench.commands import add_benchmarks


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `bench` and its benchmarks."""
    parser = subparsers.add_parser("bench", help="benchmark Echelon and comparable systems")
    add_benchmarks(parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True))
