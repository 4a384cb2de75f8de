"""Checks of a benchmark's flags, before anything starts."""

from __future__ import annotations

import argparse

from echelon.errors import UsageError


def check_numbers(args: argparse.Namespace, **least: int) -> None:
    """Raise UsageError if a flag is below its least value, given by the flag's name."""
    for name, lowest in least.items():
        if (value := getattr(args, name)) < lowest:
            raise UsageError(f"--{name.replace('_', '-')} is {value}; it must be {lowest} or more")


def check_turns(args: argparse.Namespace) -> None:
    """Raise UsageError if contenders would take no turns, or a peer is named twice."""
    check_numbers(args, rounds=1, steps=1, warmup=0)
    if len(set(args.peer)) < len(args.peer):
        raise UsageError(f"name each --peer only once; got {', '.join(args.peer)}")
