"""One process of the MXNet peer. Runs under MXNet's own environment, so it imports nothing of Echelon.

Started with DMLC_ROLE=scheduler or server it serves from within `import mxnet` and never returns from there. A worker
pushes all gradients, pulls all weights and waits for them; with `--one-call` it does both at once, key by key. SGD with
momentum and weight decay runs on the servers, and both ways give the same weights. The lines on stdin and stdout are
those of `echelon.bench.harness.protocol`, said again here in a few lines.

MXNet deals ranks by the order of its ports, so any worker may be rank 0; they all do the same work, and each times its
own steps. There is no barrier between steps, only before each round.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import mxnet as mx


class Worker:
    """Keys 0 to N-1 on the servers, and this worker's gradients and weights for them."""

    def __init__(self, kv_type: str, shapes: list[tuple[int, ...]], one_call: bool) -> None:
        self._one_call = one_call
        self._kv: Any = mx.kv.create(kv_type)
        self._gradients = [mx.nd.random.normal(0, 1e-3, shape=shape) for shape in shapes]
        self._weights = [mx.nd.ones(shape) for shape in shapes]
        for key, weight in enumerate(self._weights):
            self._kv.init(key, weight)
        if self._kv.rank == 0:
            self._kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.1, momentum=0.9, wd=1e-4))
        mx.nd.waitall()
        self._kv._barrier()

    def step(self) -> None:
        """Push every gradient, first layers first; pull every weight; wait until the last one is there."""
        if self._one_call:
            for key, gradient in enumerate(self._gradients):
                self._kv.pushpull(key, gradient, out=self._weights[key], priority=-key)
        else:
            self._push_then_pull()
        for weight in self._weights:
            weight.wait_to_read()

    def _push_then_pull(self) -> None:
        for key, gradient in enumerate(self._gradients):
            self._kv.push(key, gradient, priority=-key)
        for key, weight in enumerate(self._weights):
            self._kv.pull(key, weight, priority=-key)

    def run_round(self, num_steps: int) -> list[float]:
        """Seconds of each step."""
        self._kv._barrier()
        return [self._timed_step() for _ in range(num_steps)]

    def _timed_step(self) -> float:
        start = time.perf_counter()
        self.step()
        return time.perf_counter() - start


def say(**answer: object) -> None:
    """Print an answer for the harness at once."""
    print(json.dumps(answer), flush=True)


def main() -> None:
    """Serve rounds until told to quit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", type=Path, required=True, help="JSON list of tensor shapes")
    parser.add_argument("--kv-store", required=True, help="dist_sync or dist_async")
    parser.add_argument("--one-call", action="store_true", help="pushpull instead of push and pull")
    args = parser.parse_args()
    shapes = [tuple(shape) for shape in json.loads(args.shapes.read_text())]
    worker = Worker(args.kv_store, shapes, args.one_call)
    say(ready=True)
    for line in iter(sys.stdin.readline, "quit\n"):
        if not line:
            return
        say(step_s=worker.run_round(int(line.removeprefix("run "))))


if __name__ == "__main__":
    main()
