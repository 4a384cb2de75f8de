"""What the worker programs of `echelon bench io` share: their flags, and rounds that end when the loader is idle.

It needs only the standard library, because `worker_mxnet` runs under MXNet's Python.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from echelon.bench.harness.protocol import serve, timed


def read_flags() -> argparse.Namespace:
    """Return the flags that `contenders` passes to a worker program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rec", required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--step-batches", type=int, required=True)
    return parser.parse_args()


def serve_batches(take: Callable[[], object], step_batches: int, wait_until_idle: Callable[[], None]) -> None:
    """Run rounds until the harness sends `quit`. A step calls `take` for each of its batches.

    A round ends when the loader has stopped working ahead. Otherwise it would use a core during the next contender's
    turn, and the batches that it prepares then would not be timed.
    """

    def step() -> None:
        for _ in range(step_batches):
            take()

    def run_round(num_steps: int) -> list[float]:
        step_s = [timed(step) for _ in range(num_steps)]
        wait_until_idle()
        return step_s

    serve(run_round)
