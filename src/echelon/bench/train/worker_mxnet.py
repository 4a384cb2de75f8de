"""One process of the MXNet peer of `echelon bench train`.

It runs under MXNet's Python, which has neither Echelon nor torch installed. With DMLC_ROLE=scheduler or server, `import
mxnet` serves the job and never returns. A worker trains with Gluon's Trainer; its network is compiled with static
memory (`hybridize`), and SGD runs on the servers. The networks have the same layers as in `networks`. Their initial
weights follow the same rule (He), but are not the same numbers. A step ends when its loss has been fetched; MXNet's
engine pushes and pulls while the next step runs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import nn

sys.path.append(str(Path(__file__).resolve().parents[3]))  # last, so that it shadows nothing of MXNet's Python
from echelon.bench.harness.protocol import serve
from echelon.bench.train.workloads import MLP_WIDTHS, MOMENTUM, NUM_CLASSES, WEIGHT_DECAY, WORKLOADS, Loop

EPS = 2e-5


class Unit(nn.HybridBlock):  # type: ignore[misc]  # MXNet has no annotations
    """body(a) + x with a = relu(bn(x)). The first unit of a stage adds a projection of a instead of x."""

    def __init__(self, filters: int, stride: int, projects: bool) -> None:
        super().__init__()
        self.activate = in_order(nn.BatchNorm(epsilon=EPS), nn.Activation("relu"))
        self.body = in_order(
            conv(filters, 3, stride), nn.BatchNorm(epsilon=EPS), nn.Activation("relu"), conv(filters, 3, 1)
        )
        self.shortcut = conv(filters, 1, stride) if projects else None

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        """Apply batch norm and relu, then the convolutions."""
        a = self.activate(x)
        return self.body(a) + (x if self.shortcut is None else self.shortcut(a))


def conv(filters: int, kernel: int, stride: int) -> Any:
    """Return a convolution without bias and with padding, so that only the stride changes the size."""
    return nn.Conv2D(filters, kernel, stride, kernel // 2, use_bias=False)


def in_order(*layers: Any) -> Any:
    """Return the layers as a sequence."""
    sequence = nn.HybridSequential()
    sequence.add(*layers)
    return sequence


def resnet20() -> Any:
    """Return a ResNet v2 with 20 layers for small images."""
    units = [Unit(width, 1 if width == 16 or index else 2, index == 0) for width in (16, 32, 64) for index in range(3)]
    head = (nn.BatchNorm(epsilon=EPS), nn.Activation("relu"), nn.GlobalAvgPool2D(), nn.Flatten(), nn.Dense(NUM_CLASSES))
    return in_order(nn.BatchNorm(epsilon=EPS, scale=False), conv(16, 3, 1), *units, *head)


def mlp25m() -> Any:
    """Return a network with two hidden layers."""
    _, first, second, classes = MLP_WIDTHS
    return in_order(nn.Dense(first, activation="relu"), nn.Dense(second, activation="relu"), nn.Dense(classes))


class Worker:
    """A network with its batch and its Trainer."""

    def __init__(self, model: str, batch_size: int, kv_store: str) -> None:
        self._kv: Any = mx.kv.create(kv_store)
        mx.random.seed(1 + self._kv.rank)
        self._images = mx.nd.random.uniform(-1, 1, shape=(batch_size, *WORKLOADS[model].input_shape))
        self._labels = mx.nd.random.randint(0, NUM_CLASSES, shape=(batch_size,)).astype("float32")
        self._net = {"resnet20": resnet20, "mlp25m": mlp25m}[model]()
        self._net.initialize(mx.init.MSRAPrelu(factor_type="in", slope=0))
        self._net.hybridize(static_alloc=True, static_shape=True)
        self._loss = gluon.loss.SoftmaxCrossEntropyLoss()
        self._loss.hybridize(static_alloc=True, static_shape=True)
        self._samples = batch_size * self._kv.num_workers
        settings = {"learning_rate": WORKLOADS[model].lr, "momentum": MOMENTUM, "wd": WEIGHT_DECAY}
        self._trainer = gluon.Trainer(self._net.collect_params(), "sgd", settings, kvstore=self._kv)

    def barrier(self) -> None:
        """Wait for all workers."""
        self._kv._barrier()

    def step(self) -> float:
        """Do one training step and return its loss."""
        with autograd.record():
            loss = self._loss(self._net(self._images), self._labels).mean() * len(self._images)
        loss.backward()
        self._trainer.step(self._samples)
        return float(loss.asscalar()) / len(self._images)


def main() -> None:
    """Join the job and run rounds until the harness sends `quit`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=WORKLOADS, required=True)
    parser.add_argument("--batch-size", type=int, required=True, help="samples per step of this worker")
    parser.add_argument("--kv-store", required=True, help="dist_sync or dist_async")
    args = parser.parse_args()
    worker = Worker(args.model, args.batch_size, args.kv_store)
    serve(Loop(worker.step, worker.barrier, mx.nd.waitall).run_round)


if __name__ == "__main__":
    main()
