"""Graphs of networks with the names of MXNet's arrays: their digests, and the symbol files that MXNet would write."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import msgspec
from torch import nn

from echelon.train.checkpoint.mxnet.graph import (
    ACTIVATION,
    ADD,
    CONCAT,
    CONV,
    INPUT,
    LINEAR,
    LRN,
    NORM,
    POOL,
    SCALE,
    TRANSFORMER,
    Graph,
    Op,
    Settings,
    graph_of,
)
from echelon.train.checkpoint.mxnet.names import LAYERS, array_names, suffixes

Node = dict[str, Any]


def named_graph(network: str, model: nn.Module) -> Graph:
    """Return the graph of a network, with the names that MXNet's script gives to its arrays."""
    graph, names = graph_of(model), array_names(network, model)
    layers = {path: module for path, module in model.named_modules() if isinstance(module, LAYERS)}
    for index, op in enumerate(graph.ops):
        if op.name in layers:
            arrays = tuple(names[f"{op.name}.{own}"] for own in suffixes(layers[op.name]))
            graph.ops[index] = replace(op, arrays=arrays)
    return graph


def digest(graph: Graph) -> str:
    """Return a digest of all operators, settings, connections and names of arrays that lead to the output."""
    found: list[str] = []
    for op in graph.ops:
        inputs = [found[index] for index in op.inputs]
        parts = (op.kind, _listed(op.settings), op.arrays, sorted(inputs) if op.kind == ADD else inputs)
        found.append(blake2b(repr(parts).encode(), digest_size=8).hexdigest())
    return found[graph.output]


def _listed(settings: Settings) -> list[str]:
    """List the settings; not the target size of a spatial transformer, which here is the size of its input."""
    known = {name: value for name, value in settings.items() if name != "target"}
    return sorted(
        f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}" for name, value in known.items()
    )


def symbol_nodes(graph: Graph, size: tuple[int, int] = (28, 28)) -> list[Node]:
    """Return the nodes of the symbol file of a graph, without a softmax. `size` is that of the images."""
    nodes: list[Node] = []
    places: list[int] = []

    def add(op: str, name: str, inputs: Iterable[int] = (), **attrs: object) -> int:
        texts = {key: str(value) for key, value in attrs.items()}
        nodes.append({"op": op, "name": name, "attrs": texts, "inputs": [[one, 0, 0] for one in inputs]})
        return len(nodes) - 1

    for op in graph.ops:
        data = [places[index] for index in op.inputs]
        if op.kind == INPUT:
            places.append(add("null", "data"))
            continue
        arrays = [add("null", name) for name in op.arrays]
        kind, attrs = _OPERATORS[op.kind](op)
        if op.kind == TRANSFORMER:
            attrs["target_shape"] = size
        places.append(add(kind, op.name.replace(".", "_"), [*data, *arrays], **attrs))
    return nodes


def symbol_text(nodes: list[Node]) -> bytes:
    """Return a symbol file with a softmax after the last node, as MXNet's scripts have it."""
    label: Node = {"op": "null", "name": "softmax_label", "inputs": []}
    inputs = [[len(nodes) - 1, 0, 0], [len(nodes), 0, 0]]
    softmax: Node = {"op": "SoftmaxOutput", "name": "softmax", "inputs": inputs}
    variables = [index for index, node in enumerate([*nodes, label]) if node["op"] == "null"]
    symbol = {"nodes": [*nodes, label, softmax], "arg_nodes": variables, "heads": [[len(nodes) + 1, 0, 0]]}
    return msgspec.json.encode({**symbol, "attrs": {"mxnet_version": ["int", 10901]}})


def _convolution(op: Op) -> tuple[str, Settings]:
    names = {"num_filter": "filters", "kernel": "kernel", "stride": "stride", "pad": "pad", "num_group": "groups"}
    attrs = {theirs: op.settings[ours] for theirs, ours in names.items()}
    return "Convolution", {**attrs, "no_bias": not op.settings["bias"]}


def _pooling(op: Op) -> tuple[str, Settings]:
    if op.settings.get("global"):
        return "Pooling", {"pool_type": op.settings["type"], "global_pool": True, "kernel": (1, 1)}
    return "Pooling", {
        "pool_type": op.settings["type"],
        **{key: op.settings[key] for key in ("kernel", "stride", "pad")},
    }


def _activation(op: Op) -> tuple[str, Settings]:
    if op.settings["function"] == "clip":
        return "clip", {"a_min": op.settings["from"], "a_max": op.settings["to"]}
    return "Activation", {"act_type": op.settings["function"]}


_OPERATORS: dict[str, Callable[[Op], tuple[str, Settings]]] = {
    CONV: _convolution,
    LINEAR: lambda op: ("FullyConnected", {"num_hidden": op.settings["units"], "no_bias": not op.settings["bias"]}),
    NORM: lambda op: ("BatchNorm", dict(op.settings)),
    POOL: _pooling,
    ACTIVATION: _activation,
    ADD: lambda op: ("elemwise_add", {}),
    SCALE: lambda op: ("_mul_scalar", {"scalar": op.settings["factor"]}),
    CONCAT: lambda op: ("Concat", {"num_args": len(op.inputs)}),
    LRN: lambda op: (
        "LRN",
        {name: op.settings[ours] for name, ours in zip(("nsize", "alpha", "beta", "knorm"), op.settings, strict=True)},
    ),
    TRANSFORMER: lambda op: ("SpatialTransformer", {"sampler_type": "bilinear", "transform_type": "affine"}),
}
