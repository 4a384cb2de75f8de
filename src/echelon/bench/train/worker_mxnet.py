"""One process of the MXNet peer of `echelon bench train`, under MXNet's own environment: it imports nothing of Echelon.

Started with DMLC_ROLE=scheduler or server it serves from within `import mxnet`. A worker trains with Gluon's Trainer,
its network compiled with static memory (`hybridize`), SGD on the servers. The networks are those of `workloads`, layer
by layer, with the same start by rule (He's) but not by number. Fetching the loss ends a step: what is pushed and pulled
goes on under the next one, as MXNet's engine does it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from itertools import pairwise
from typing import Any

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import nn

EPS = 2e-5
LEARNING_RATES = {"resnet20": 0.05, "mlp25m": 0.001}
INPUT_SHAPES = {"resnet20": (3, 28, 28), "mlp25m": (3072,)}


class Unit(nn.HybridBlock):  # type: ignore[misc]  # MXNet has no annotations
    """body(a) + x with a = relu(bn(x)); the first unit of a stage adds a projection of a in place of x."""

    def __init__(self, filters: int, stride: int, projects: bool) -> None:
        super().__init__()
        self.activate = in_order(nn.BatchNorm(epsilon=EPS), nn.Activation("relu"))
        self.body = in_order(
            conv(filters, 3, stride), nn.BatchNorm(epsilon=EPS), nn.Activation("relu"), conv(filters, 3, 1)
        )
        self.shortcut = conv(filters, 1, stride) if projects else None

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        """Before the convolutions: batch norm and relu."""
        a = self.activate(x)
        return self.body(a) + (x if self.shortcut is None else self.shortcut(a))


def conv(filters: int, kernel: int, stride: int) -> Any:
    """A convolution without bias that keeps the size, but for its stride."""
    return nn.Conv2D(filters, kernel, stride, kernel // 2, use_bias=False)


def in_order(*layers: Any) -> Any:
    """Layers one after the other."""
    sequence = nn.HybridSequential()
    sequence.add(*layers)
    return sequence


def resnet20() -> Any:
    """ResNet v2 with 20 layers for small images."""
    units = [Unit(width, 1 if width == 16 or index else 2, index == 0) for width in (16, 32, 64) for index in range(3)]
    head = (nn.BatchNorm(epsilon=EPS), nn.Activation("relu"), nn.GlobalAvgPool2D(), nn.Flatten(), nn.Dense(10))
    return in_order(nn.BatchNorm(epsilon=EPS, scale=False), conv(16, 3, 1), *units, *head)


def mlp25m() -> Any:
    """Two hidden layers."""
    return in_order(nn.Dense(4096, activation="relu"), nn.Dense(3072, activation="relu"), nn.Dense(10))


class Worker:
    """A network, its batch and its Trainer."""

    def __init__(self, model: str, batch_size: int, kv_store: str) -> None:
        self._kv: Any = mx.kv.create(kv_store)
        mx.random.seed(1 + self._kv.rank)
        self._images = mx.nd.random.uniform(-1, 1, shape=(batch_size, *INPUT_SHAPES[model]))
        self._labels = mx.nd.random.randint(0, 10, shape=(batch_size,)).astype("float32")
        self._net = {"resnet20": resnet20, "mlp25m": mlp25m}[model]()
        self._net.initialize(mx.init.MSRAPrelu(factor_type="in", slope=0))
        self._net.hybridize(static_alloc=True, static_shape=True)
        self._loss = gluon.loss.SoftmaxCrossEntropyLoss()
        self._loss.hybridize(static_alloc=True, static_shape=True)
        self._samples = batch_size * self._kv.num_workers
        settings = {"learning_rate": LEARNING_RATES[model], "momentum": 0.9, "wd": 1e-4}
        self._trainer = gluon.Trainer(self._net.collect_params(), "sgd", settings, kvstore=self._kv)

    def run_round(self, num_steps: int) -> dict[str, list[float]]:
        """The seconds and losses of each step; the last one has to wait for its weights."""
        self._kv._barrier()
        losses = []
        marks = [time.perf_counter()]
        for index in range(num_steps):
            losses.append(self._step())
            if index == num_steps - 1:
                mx.nd.waitall()
            marks.append(time.perf_counter())
        return {"step_s": [after - before for before, after in pairwise(marks)], "losses": losses}

    def _step(self) -> float:
        with autograd.record():
            loss = self._loss(self._net(self._images), self._labels).mean() * len(self._images)
        loss.backward()
        self._trainer.step(self._samples)
        return float(loss.asscalar()) / len(self._images)


def say(**answer: object) -> None:
    """Print an answer for the harness at once."""
    print(json.dumps(answer), flush=True)


def main() -> None:
    """Serve rounds until told to quit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=INPUT_SHAPES, required=True)
    parser.add_argument("--batch-size", type=int, required=True, help="of this worker")
    parser.add_argument("--kv-store", required=True, help="dist_sync or dist_async")
    args = parser.parse_args()
    worker = Worker(args.model, args.batch_size, args.kv_store)
    say(ready=True)
    for line in iter(sys.stdin.readline, "quit\n"):
        if not line:
            return
        say(**worker.run_round(int(line.removeprefix("run "))))


if __name__ == "__main__":
    main()
