"""Symbol files: a file of the same network pairs its layers whatever their names, and any difference is an error."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from echelon import models
from echelon.errors import DataError
from echelon.train.checkpoint.mxnet import symbol
from echelon.train.checkpoint.mxnet.graph import CONCAT, CONV, INPUT, Graph, Op, graph_of, pair
from mxnet_graphs import Node, named_graph, symbol_nodes, symbol_text


def build(network: str, shape: tuple[int, int, int], num_layers: int | None = None) -> nn.Module:
    with torch.device("meta"):
        return models.build(network, num_classes=10, image_shape=shape, num_layers=num_layers)


@pytest.fixture(scope="module")
def resnet() -> nn.Module:
    return build("resnet", (3, 28, 28), 8)


@pytest.fixture
def nodes(resnet: nn.Module) -> list[Node]:
    return symbol_nodes(named_graph("resnet", resnet))


def pairs(nodes: list[Node], model: nn.Module, size: tuple[int, int] = (28, 28)) -> dict[str, tuple[str, ...]]:
    found = pair(symbol.parse(symbol_text(nodes)), graph_of(model), lambda path: size)
    return {path: op.arrays for path, op in found.items() if op.arrays}


def node_of(nodes: list[Node], name: str) -> Node:
    return next(node for node in nodes if node["name"] == name)


def test_names_do_not_matter(nodes: list[Node], resnet: nn.Module) -> None:
    expected = pairs(nodes, resnet)
    assert expected["features.stages.stage2.unit1.shortcut"] == ("stage2_unit1_sc_weight",)
    assert len(expected["features.norm1.bn"]) == 4
    for number, node in enumerate(nodes):
        node["name"] = node["name"] if node["name"] == "data" else f"x{number}"
    renamed = pairs(nodes, resnet)
    assert renamed.keys() == expected.keys()
    assert len({array for arrays in renamed.values() for array in arrays}) == sum(map(len, expected.values()))


def test_the_order_of_terms_does_not_matter(nodes: list[Node], resnet: nn.Module) -> None:
    expected = pairs(nodes, resnet)
    for node in nodes:
        if node["op"] == "elemwise_add":
            node["inputs"].reverse()
    assert pairs(nodes, resnet) == expected


def test_the_order_of_concatenation_matters() -> None:
    model = build("inception-bn", (3, 28, 28))
    nodes = symbol_nodes(named_graph("inception-bn", model))
    next(node for node in nodes if node["op"] == "Concat")["inputs"].reverse()
    with pytest.raises(DataError, match=r"the convolution .* differs from .*: "):
        pairs(nodes, model)


def set_attr(name: str, key: str, value: str) -> Callable[[list[Node]], None]:
    return lambda nodes: node_of(nodes, name)["attrs"].update({key: value})


def set_op(name: str, op: str) -> Callable[[list[Node]], None]:
    return lambda nodes: node_of(nodes, name).update(op=op)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            set_attr("features_norm1_bn", "eps", "0.001"),
            r"the batch norm 'features_norm1_bn' of the symbol file differs from 'features\.norm1\.bn' of the network: "
            r"eps 0\.001 there, 2e-05 here$",
        ),
        (set_attr("features_bn_data", "fix_gamma", "False"), "fix_gamma False there, True here"),
        (set_attr("features_norm1_bn", "axis", "3"), "axis 3 there, not set here"),
        (set_attr("features_stem_conv0", "stride", "(2L, 2L)"), r"stride \(2, 2\) there, \(1, 1\) here"),
        (set_attr("features_stem_conv0", "dilate", "(2, 2)"), r"dilate \(2, 2\) there, \(1, 1\) here"),
        (set_attr("features_stem_conv0", "num_filter", "17"), "filters 17 there, 16 here"),
        (set_attr("features_norm1_relu", "act_type", "tanh"), "function tanh there, relu here"),
        (set_attr("features_pool1", "pool_type", "max"), "type max there, avg here"),
        (set_attr("classifier_fc", "num_hidden", "11"), "units 11 there, 10 here"),
        (set_attr("classifier_fc", "flatten", "False"), "flatten False there, not set here"),
        (
            set_op("features_norm1_relu", "Flatten"),
            "the batch norm .* is where the network has .*, which is of the kind",
        ),
        (
            set_op("features_norm1_relu", "LeakyReLU"),
            r"has the operator LeakyReLU \('features_norm1_relu'\), which none",
        ),
        (set_attr("features_stem_conv0", "num_filter", "many"), "the settings of Convolution .* cannot be read"),
    ],
)
def test_a_different_network_is_rejected(
    change: Callable[[list[Node]], None], message: str, nodes: list[Node], resnet: nn.Module
) -> None:
    change(nodes)
    with pytest.raises(DataError, match=message):
        pairs(nodes, resnet)


def test_a_different_depth_is_rejected(nodes: list[Node]) -> None:
    with pytest.raises(DataError, match="of the symbol file is where the network has"):
        pairs(nodes, build("resnet", (3, 28, 28), 14))


def test_several_differences_are_counted(nodes: list[Node], resnet: nn.Module) -> None:
    for node in nodes:
        if node["op"] == "BatchNorm":
            node["attrs"]["eps"] = "0.001"
    with pytest.raises(DataError, match=r"'features_bn_data' .*; 7 more operators differ$"):
        pairs(nodes, resnet)


def test_pooling_is_compared_by_its_windows() -> None:
    """On even maps the convention `full`, of vgg models from Caffe, gives the same windows as `valid`."""
    model = build("vgg", (3, 32, 32), 11)
    nodes = symbol_nodes(named_graph("vgg", model))
    pools = [node for node in nodes if node["op"] == "Pooling"]
    for pool in pools:
        pool["attrs"]["pooling_convention"] = "full"
    assert len(pairs(nodes, model, (8, 8))) == 11
    with pytest.raises(DataError, match="convention full there, not set here; 4 more operators differ"):
        pairs(nodes, model, (9, 9))
    pools[0]["attrs"]["stride"] = "(0, 0)"
    with pytest.raises(DataError, match=r"stride \(0, 0\) there, \(2, 2\) here, convention full there, not set here$"):
        pairs(nodes, model, (8, 8))
    resnet = build("resnet", (3, 28, 28), 8)
    nodes = symbol_nodes(named_graph("resnet", resnet))
    node_of(nodes, "features_pool1")["attrs"] = {"pool_type": "avg", "kernel": "(7, 7)"}  # as in MXNet 0.7
    assert pairs(nodes, resnet, (7, 7))
    with pytest.raises(DataError, match=r"kernel \(7, 7\) there, not set here"):
        pairs(nodes, resnet, (8, 8))


def test_files_of_older_versions(nodes: list[Node], resnet: nn.Module) -> None:
    """Before 0.9 settings were in `param`, attributes in `attr`, and moving statistics were not inputs."""
    expected = pairs(nodes, resnet)
    for node in nodes:
        node["param"] = node.pop("attrs")
        node["attr"] = {"ctx_group": "a"}
        node["inputs"] = [one[:2] for one in node["inputs"]]
        if node["op"] == "BatchNorm":
            node["inputs"] = node["inputs"][:3]
            gamma = nodes[node["inputs"][1][0]]["name"]
            node["name"] = gamma.removesuffix("_gamma")
    assert pairs(nodes, resnet) == expected


def test_weights_that_are_cast_or_computed() -> None:
    model = build("mlp", (1, 28, 28))
    nodes = symbol_nodes(named_graph("mlp", model))
    cast: Node = {"op": "amp_cast", "name": "cast", "attrs": {"dtype": "float16"}, "inputs": [[1, 0, 0]]}
    place = next(index for index, node in enumerate(nodes) if node["op"] == "FullyConnected")
    nodes.insert(place, cast)
    for node in nodes[place + 1 :]:
        node["inputs"] = [[one + (one >= place), *rest] for one, *rest in node["inputs"]]
    nodes[place + 1]["inputs"][1] = [place, 0, 0]
    assert pairs(nodes, model)["classifier.fc1"] == ("fc1_weight", "fc1_bias")
    nodes[place]["op"] = "relu"
    with pytest.raises(DataError, match="a weight of 'classifier_fc1' is computed by relu 'cast'"):
        pairs(nodes, model)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "it is not a symbol of MXNet: Input data was truncated"),
        (b'{"nodes": []}', "missing required field `heads`"),
        (b'{"nodes": [], "heads": []}', "it has no output"),
        (b'{"nodes": [{"op": "relu", "name": "r", "inputs": [[0, 0]]}], "heads": [[0]]}', "inputs of 'r' do not come"),
        (b'{"nodes": [{"op": "relu", "name": "r", "inputs": []}], "heads": [[0]]}', "has the operator relu"),
        (b'{"nodes": [{"op": "softmax", "name": "s", "inputs": []}], "heads": [[0]]}', "has the operator softmax"),
        (b'{"nodes": [{"op": "\xff", "name": "s", "inputs": []}], "heads": [[0]]}', "can't decode byte 0xff"),
        (b'{"nodes": [], "heads": [], "x": ' + b"[" * 100_000, "recursion"),
        (
            b'{"nodes": [{"op": "null", "name": "d", "inputs": []}, {"op": "LRN", "name": "n", "inputs": [[0]], '
            b'"attrs": {"nsize": "1e999"}}], "heads": [[1]]}',
            "the settings of LRN 'n' cannot be read",
        ),
    ],
    ids=range(9),
)
def test_invalid_files_are_rejected(text: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x-symbol.json"
    path.write_bytes(text)
    with pytest.raises(DataError, match=f"the symbol file {re.escape(str(path))} cannot be used: .*{message}"):
        symbol.load(path)


def two_branches(*, shared: bool) -> Graph:
    """Return the concatenation of two equal convolutions, or of one convolution with itself."""
    graph = Graph()
    data = graph.add(Op(INPUT, "data"))
    left = graph.add(Op(CONV, "left", (data,), {"filters": 4}))
    right = left if shared else graph.add(Op(CONV, "right", (data,), {"filters": 4}))
    graph.output = graph.add(Op(CONCAT, "both", (left, right)))
    return graph


def test_a_layer_that_is_used_twice_is_not_two_layers() -> None:
    same = pair(two_branches(shared=False), two_branches(shared=False), lambda path: (1, 1))
    assert same["right"].name == "right"
    with pytest.raises(DataError, match="one operator of the symbol file takes the place of several layers"):
        pair(two_branches(shared=True), two_branches(shared=False), lambda path: (1, 1))
    with pytest.raises(DataError, match="'left' of the symbol file is where the network has 'left'; so is 'right'"):
        pair(two_branches(shared=False), two_branches(shared=True), lambda path: (1, 1))
