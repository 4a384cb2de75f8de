"""Trained models of MXNet 1.9.1: their outputs in Echelon equal MXNet's, read with and without the symbol file.

MXNet builds each network from a symbol file that the test makes; `test_mxnet_names` proves that it is the symbol of
MXNet's script. Weights, biases, scales and moving statistics are random. Needs MXNet's Python: .peers/mxnet, or the one
that ECHELON_MXNET_PYTHON names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from echelon import models
from echelon.train.checkpoint.mxnet import model as mxnet
from echelon.train.checkpoint.mxnet import params
from echelon.train.predict import model_of
from mxnet_graphs import named_graph, symbol_nodes, symbol_text
from mxnet_peer import run_mxnet
from tolerances import reordering

pytestmark = [pytest.mark.peer, pytest.mark.numeric]

NUM_IMAGES = 2
Shape = tuple[int, int, int]

CASES: list[tuple[str, Shape, int | None, dict[str, Any]]] = [
    ("mlp", (1, 28, 28), None, {}),
    ("lenet", (1, 28, 28), None, {}),
    ("lenet", (1, 28, 28), None, {"add_stn": True}),
    ("alexnet", (3, 224, 224), None, {}),
    ("vgg", (3, 224, 224), 11, {}),
    ("googlenet", (3, 224, 224), None, {}),
    ("inception-bn", (3, 224, 224), None, {}),
    ("inception-bn", (3, 28, 28), None, {}),
    ("inception-v3", (3, 299, 299), None, {}),
    ("inception-v4", (3, 299, 299), None, {}),
    ("inception-resnet-v2", (3, 299, 299), None, {}),
    ("resnet", (3, 28, 28), 20, {}),
    ("resnet", (3, 32, 32), 18, {}),
    ("resnet", (3, 224, 224), 50, {}),
    ("resnet-v1", (3, 28, 28), 20, {}),
    ("resnet-v1", (3, 224, 224), 18, {}),
    ("resnet-28-small", (3, 28, 28), None, {}),
    ("resnext", (3, 28, 28), 164, {}),
    ("resnext", (3, 224, 224), 50, {}),
    ("mobilenet", (3, 224, 224), None, {}),
    ("mobilenetv2", (3, 224, 224), None, {}),
]


def mxnet_outputs(folder: Path, shape: Shape, *more: str | Path) -> tuple[Tensor, Tensor]:
    """Return the images and MXNet's outputs."""
    batch = json.dumps((NUM_IMAGES, *shape))
    run_mxnet("models_mxnet_side.py", None, folder, batch, *more, timeout_s=280)
    found = np.load(folder / "outputs.npz")
    return torch.from_numpy(found["images"]), torch.from_numpy(found["outputs"])


def write_symbol(folder: Path, network: str, shape: Shape, depth: int | None, options: dict[str, Any]) -> nn.Module:
    with torch.device("meta"):
        model = models.build(network, num_classes=10, image_shape=shape, num_layers=depth, **options)
    (folder / "x-symbol.json").write_bytes(symbol_text(symbol_nodes(named_graph(network, model), shape[1:])))
    return model


def assert_same_outputs(model: nn.Module, images: Tensor, expected: Tensor) -> None:
    """Every layer rounds its sums in another order than MXNet's; the largest sums have as many terms as fan_in."""
    with torch.inference_mode():
        found = model.eval()(images)
    weights = [weight for weight in model.parameters() if weight.dim() > 1]
    terms = max(weight[0].numel() for weight in weights)
    tolerance = reordering(torch.float32, terms, 1) * len(weights) ** 0.5
    error = float((found - expected).abs().max() / expected.abs().max())
    assert error < tolerance
    assert not torch.allclose(expected[0], expected[1], rtol=10 * tolerance)  # the outputs depend on the images


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("network", "shape", "depth", "options"), CASES)
def test_the_outputs_equal_those_of_mxnet(
    network: str, shape: Shape, depth: int | None, options: dict[str, Any], tmp_path: Path
) -> None:
    write_symbol(tmp_path, network, shape, depth, options)
    images, expected = mxnet_outputs(tmp_path, shape)
    path = tmp_path / "x-0012.params"
    for symbol in (True, False):
        if not symbol:
            (tmp_path / "x-symbol.json").unlink()
        found = mxnet.load(path)
        assert (found.metadata["network"], found.metadata["num_layers"]) == (network, depth)
        assert tuple(found.metadata["image_shape"]) == shape
        assert_same_outputs(model_of(found, path), images, expected)


def test_mxnet_reads_what_echelon_writes(tmp_path: Path) -> None:
    """The scale of batch norm on the data counts as 1 on both sides, whatever the file has."""
    shape = (3, 28, 28)
    write_symbol(tmp_path, "resnet", shape, 8, {})
    torch.manual_seed(4)
    model = models.build("resnet", num_classes=10, image_shape=shape, num_layers=8)
    for name, tensor in model.state_dict().items():
        if "running" in name or "bn.weight" in name:
            tensor.uniform_(0.5, 1.5)
    params.save(tmp_path / "y.params", mxnet.arrays_of("resnet", model))
    images, expected = mxnet_outputs(tmp_path, shape, tmp_path / "y.params")
    assert_same_outputs(model, images, expected)
