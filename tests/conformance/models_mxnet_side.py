"""Runs under MXNet's Python: saves a network with random weights as MXNet's scripts do, and its outputs on images.

Takes the folder of `x-symbol.json` and the shape of a batch. Writes x-symbol.json again, x-0012.params, and the images
and outputs before the softmax. With a third argument, outputs are computed with the arrays of that .params file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np


def value(name: str, shape: tuple[int, ...], random: Any) -> Any:
    """Return an array whose values are typical of a trained network; the scales of batch norm are not 1."""
    if name.endswith("moving_var"):
        return random.uniform(0.3, 3.0, shape)
    if name.endswith("gamma"):
        return random.uniform(0.5, 1.5, shape)
    if name == "stn_loc_bias":
        return np.array([1.0, 0.1, 0.05, -0.1, 0.9, 0.1])
    if name.endswith("weight"):
        small = 0.05 if name == "stn_loc_weight" else 1.0
        return random.normal(0.0, small * np.sqrt(2.0 / np.prod(shape[1:])), shape)
    return random.uniform(-0.3, 0.3, shape)


def main(folder: Path, shape: tuple[int, ...], given: str | None) -> None:
    random = np.random.RandomState(3)
    symbol = mx.sym.load(str(folder / "x-symbol.json"))
    shapes, _, aux_shapes = symbol.infer_shape(data=shape)
    sizes = {
        name: one
        for name, one in zip(symbol.list_arguments(), shapes, strict=True)
        if name not in ("data", "softmax_label")
    }
    arguments = {name: mx.nd.array(value(name, one, random)) for name, one in sizes.items()}
    auxiliary = {
        name: mx.nd.array(value(name, one, random))
        for name, one in zip(symbol.list_auxiliary_states(), aux_shapes, strict=True)
    }
    if given is None:
        mx.model.save_checkpoint(str(folder / "x"), 12, symbol, arguments, auxiliary)
    else:
        loaded = mx.nd.load(given)
        arguments = {name[4:]: array for name, array in loaded.items() if name.startswith("arg:")}
        auxiliary = {name[4:]: array for name, array in loaded.items() if name.startswith("aux:")}
    images = random.uniform(-1.0, 1.0, shape).astype(np.float32)
    outputs = symbol.get_internals()["classifier_fc_output"]
    executor = outputs.simple_bind(mx.cpu(), grad_req="null", data=shape)
    executor.copy_params_from(arguments, auxiliary)
    found = executor.forward(is_train=False, data=mx.nd.array(images))[0].asnumpy()
    np.savez(folder / "outputs.npz", images=images, outputs=found)


if __name__ == "__main__":
    main(Path(sys.argv[1]), tuple(json.loads(sys.argv[2])), sys.argv[3] if len(sys.argv) > 3 else None)
