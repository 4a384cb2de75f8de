"""Runs under MXNet's Python: trains a small network with a Module, as its scripts do. Requests and weights are JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import mxnet as mx


def train(
    optimizer: str, settings: dict[str, Any], steps: list[int], weights: dict[str, Any], images: Any, labels: Any
) -> dict[str, Any]:
    """Return the weights after one pass over the batches. The rate drops by 10 after each of `steps`."""
    hidden = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=len(weights["fc1_bias"]), name="fc1")
    output = mx.sym.FullyConnected(mx.sym.Activation(hidden, act_type="tanh"), num_hidden=3, name="fc2")
    module = mx.mod.Module(mx.sym.SoftmaxOutput(output, name="softmax"))
    batch, width = len(images[0]), len(images[0][0])
    module.bind(data_shapes=[("data", (batch, width))], label_shapes=[("softmax_label", (batch,))])
    module.init_params(arg_params={name: mx.nd.array(value) for name, value in weights.items()})
    scheduler = mx.lr_scheduler.MultiFactorScheduler(steps, 0.1, base_lr=settings["learning_rate"])
    settings = {"rescale_grad": 1 / batch, "lr_scheduler": scheduler, **settings}
    module.init_optimizer(kvstore=None, optimizer=optimizer, optimizer_params=settings)
    for data, label in zip(images, labels):  # noqa: B905  # MXNet's Python may be 3.9
        module.forward_backward(mx.io.DataBatch([mx.nd.array(data)], [mx.nd.array(label)]))
        module.update()
    return {name: value.asnumpy().tolist() for name, value in module.get_params()[0].items()}


print(json.dumps([train(**case) for case in json.load(sys.stdin)]))
