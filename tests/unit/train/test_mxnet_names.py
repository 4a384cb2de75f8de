"""Every network of the zoo, with the names of its arrays, is the network of MXNet's example script.

The digests are of the symbols that the scripts of MXNet 1.9.1 build (example/image-classification/symbols, 10 classes):
`digest(symbol.load("prefix-symbol.json"))`. They cover operators, settings, connections and names.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from echelon import models
from echelon.errors import UsageError
from echelon.train.checkpoint.mxnet import symbol
from echelon.train.checkpoint.mxnet.graph import CONCAT
from echelon.train.checkpoint.mxnet.names import array_names, layer_names, renumbered
from mxnet_graphs import digest, named_graph, symbol_nodes, symbol_text


class Row(NamedTuple):
    network: str
    num_layers: int | None
    channels: int
    side: int
    digest: str
    options: dict[str, Any] = {}  # noqa: RUF012

    def __str__(self) -> str:
        return "-".join(map(str, [self.network, self.num_layers or "", self.side, *self.options]))


SCRIPTS = [
    Row("mlp", None, 1, 28, "ef5feb99646fca7e"),
    Row("lenet", None, 1, 28, "8b79de1726331fb4"),
    Row("lenet", None, 1, 28, "2fcc049df892951d", {"add_stn": True}),
    Row("alexnet", None, 3, 224, "d96b79081f7e8dae"),
    Row("vgg", 11, 3, 224, "2cf40a1aff63dcfd"),
    Row("vgg", 13, 3, 224, "1ab9a03ca4c04b61"),
    Row("vgg", 16, 3, 224, "99a76e38138bedaf"),
    Row("vgg", 19, 3, 224, "527d46f996a5dfb4"),
    Row("googlenet", None, 3, 224, "5f2067ad5276d3a5"),
    Row("inception-bn", None, 3, 224, "9f04129a1893df7a"),
    Row("inception-bn", None, 3, 28, "fc2f27ac1ada3fa7"),
    Row("inception-bn-28-small", None, 3, 28, "fc2f27ac1ada3fa7"),
    Row("inception-v3", None, 3, 299, "fc66f6468f7ca8ec"),
    Row("inception-v4", None, 3, 299, "e8d7233e110aa3fb"),
    Row("inception-resnet-v2", None, 3, 299, "f20d63acc81376a2"),
    Row("mobilenet", None, 3, 224, "8abb7675e0184c0a"),
    Row("mobilenet", None, 3, 224, "62bb84be27f9ff8a", {"alpha": 0.5}),
    Row("mobilenetv2", None, 3, 224, "b80a4525d6b5d1a8"),
    Row("resnet", 20, 3, 28, "0ab69ecc70fa5ed6"),
    Row("resnet", 164, 3, 28, "1e92fe6a06e1f890"),
    Row("resnet", 50, 3, 32, "2fedfddcadb62f41"),
    Row("resnet", 18, 3, 224, "8e4f508466462532"),
    Row("resnet", 50, 3, 224, "3e0bc4b365d76db6"),
    Row("resnet-v1", 20, 3, 28, "1e0feb70f5b6fed1"),
    Row("resnet-v1", 50, 3, 224, "aa22efc03458733c"),
    Row("resnetv1", 50, 3, 224, "aa22efc03458733c"),
    Row("resnet-v1", 18, 3, 32, "80c958022e6c7934"),
    Row("resnext", 20, 3, 28, "91fd6d794e5ea12d"),
    Row("resnext", 50, 3, 224, "5d8f76e3d5434fc9"),
    Row("resnext", 164, 3, 32, "fc28ad16aaf47e6f"),
]


def build(network: str, num_layers: int | None, channels: int, side: int, **options: Any) -> nn.Module:
    with torch.device("meta"):
        shape = (channels, side, side)
        return models.build(network, num_classes=10, image_shape=shape, num_layers=num_layers, **options)


@pytest.mark.parametrize("row", SCRIPTS, ids=str)
def test_the_network_and_its_names_are_those_of_the_script(row: Row) -> None:
    model = build(row.network, row.num_layers, row.channels, row.side, **row.options)
    graph = named_graph(row.network, model)
    assert digest(graph) == row.digest
    assert digest(symbol.parse(symbol_text(symbol_nodes(graph)))) == row.digest
    tensors = [name for name in model.state_dict() if not name.endswith("num_batches_tracked")]
    names = array_names(row.network, model)
    assert sorted(names) == sorted(tensors)
    assert len(set(names.values())) == len(names)


def test_the_digest_depends_on_settings_names_and_connections() -> None:
    """Otherwise the digests above would prove little."""
    model = build("inception-bn", None, 3, 28)
    graph = named_graph("inception-bn", model)
    found = [digest(graph)]
    concat = next(index for index, op in enumerate(graph.ops) if op.kind == CONCAT)
    for index, change in (
        (1, {"arrays": ("conv_2_weight", "conv_1_bias")}),
        (1, {"settings": {**graph.ops[1].settings, "stride": (2, 2)}}),
        (concat, {"inputs": graph.ops[concat].inputs[::-1]}),
    ):
        changed = named_graph("inception-bn", model)
        changed.ops[index] = replace(changed.ops[index], **change)
        found.append(digest(changed))
    assert len(set(found)) == 4


def test_every_network_has_names_or_says_that_it_has_none() -> None:
    known = {row.network for row in SCRIPTS} | {"resnet-28-small"}
    assert set(models.names()) - known == {"digits-cnn", "inception-bn-full"}
    for network, side in (("digits-cnn", 8), ("inception-bn-full", 224)):
        with pytest.raises(UsageError, match=f"have no network like '{network}', so the names of its arrays"):
            layer_names(network, build(network, None, 3, side))


def test_the_names_of_the_old_residual_network() -> None:
    """Its script numbers 21 convolutions, with the projections of stages 2 and 3 after their blocks."""
    names = layer_names("resnet-28-small", build("resnet-28-small", None, 3, 28))
    assert names["features.conv0.conv"] == "convolution0"
    assert names["features.stage2.0.sum.body.conv2.bn"] == "batchnorm8"
    assert names["features.stage2.0.sum.shortcut.conv"] == "convolution9"
    assert names["classifier.fc"] == "fc1"
    assert "convolution20" in names.values()


def test_automatic_numbers_start_at_0() -> None:
    """MXNet numbers unnamed layers over the whole process."""
    given = [
        "convolution4_weight",
        "convolution3_bias",
        "fullyconnected0_weight",
        "batchnorm12_moving_mean",
        "fc7_bias",
    ]
    expected = [
        "convolution1_weight",
        "convolution0_bias",
        "fullyconnected0_weight",
        "batchnorm0_moving_mean",
        "fc7_bias",
    ]
    assert renumbered(given) == dict(zip(given, expected, strict=True))
