"""Runs under MXNet's Python: updates one weight with an MXNet optimizer. Requests and weights are JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import mxnet as mx


def trajectory(
    name: str, settings: dict[str, Any], weights: list[Any], gradients: list[Any], rates: list[float]
) -> list[Any]:
    """Return the weight after every update. It is named fc_weight, because some rules depend on the name."""
    optimizer = mx.optimizer.create(name, param_idx2name={0: "fc_weight"}, **settings)
    updater = mx.optimizer.get_updater(optimizer)
    weight = mx.nd.array(weights)
    found = []
    for gradient, rate in zip(gradients, rates):  # noqa: B905  # MXNet's Python may be 3.9
        optimizer.set_learning_rate(rate)
        updater(0, mx.nd.array(gradient), weight)
        found.append(weight.asnumpy().tolist())
    return found


print(json.dumps([trajectory(**case) for case in json.load(sys.stdin)]))
