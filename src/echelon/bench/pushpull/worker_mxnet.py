"""One process of the MXNet peer. It runs under MXNet's Python, which has neither Echelon nor torch installed.

With DMLC_ROLE=scheduler or server, `import mxnet` serves the job and never returns. A worker pushes all gradients,
pulls all weights and waits for them; with `--one-call` it does both in one call per key. SGD with momentum and weight
decay runs on the servers, and both ways give the same weights.

MXNet assigns ranks in the order of its ports, so any worker may be rank 0. All workers do the same work, and each times
its own steps. There is no barrier between steps, only before each round.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import mxnet as mx

sys.path.append(str(Path(__file__).resolve().parents[3]))  # last, so that it shadows nothing of MXNet's Python
from echelon.bench.harness.protocol import serve, timed
from echelon.bench.pushpull.shapes import shapes


class Worker:
    """This worker's gradients and weights of the keys 0 to N-1 on the servers."""

    def __init__(self, kv_type: str, model: str, one_call: bool) -> None:
        self._one_call = one_call
        self._kv: Any = mx.kv.create(kv_type)
        self._gradients = [mx.nd.random.normal(0, 1e-3, shape=shape) for shape in shapes(model)]
        self._weights = [mx.nd.ones(shape) for shape in shapes(model)]
        for key, weight in enumerate(self._weights):
            self._kv.init(key, weight)
        if self._kv.rank == 0:
            self._kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.1, momentum=0.9, wd=1e-4))
        mx.nd.waitall()
        self._kv._barrier()

    def step(self) -> None:
        """Push every gradient, first layers first, pull every weight and wait for all of them."""
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
        """Do the steps of a round and return the seconds of each."""
        self._kv._barrier()
        return [timed(self.step) for _ in range(num_steps)]


def main() -> None:
    """Join the job and run rounds until the harness sends `quit`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="the tensors to move, as in `echelon bench pushpull`")
    parser.add_argument("--kv-store", required=True, help="dist_sync or dist_async")
    parser.add_argument("--one-call", action="store_true", help="use pushpull instead of push and pull")
    args = parser.parse_args()
    serve(Worker(args.kv_store, args.model, args.one_call).run_round)


if __name__ == "__main__":
    main()
