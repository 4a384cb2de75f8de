"""Networks as graphs of a few operators, and the comparison of two such graphs, which pairs their layers.

Operators that do not change values in evaluation (dropout, flatten, casts) are left out, and nested concatenations are
joined. Two graphs are compared from the output to the input, with all settings. Paired layers therefore have the same
inputs, not only the same shapes: names do not matter, and a network that differs in one epsilon is rejected.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import fx, nn

from echelon.errors import DataError
from echelon.models.classic import SpatialTransformer

Settings: TypeAlias = dict[str, Any]
Size: TypeAlias = tuple[int, int]  # height, width

INPUT, CONV, NORM, LINEAR = "input", "convolution", "batch norm", "fully connected"
POOL, ADD, CONCAT, SCALE, ACTIVATION = "pooling", "addition", "concatenation", "multiplication", "activation"
LRN, TRANSFORMER = "response normalization", "spatial transformer"


@dataclass(frozen=True, slots=True)
class Op:
    """An operator. `inputs` are indices of earlier operators of its graph."""

    kind: str
    name: str  # MXNet's name, or the path of a module
    inputs: tuple[int, ...] = ()
    settings: Settings = field(default_factory=dict)
    arrays: tuple[str, ...] = ()  # the names of its weights, in MXNet's graphs


class Graph:
    """Operators in topological order, and the index of the output."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.output = -1

    def add(self, op: Op) -> int:
        """Add an operator and return its index; a multiplication by 1 is its input."""
        if op.kind == SCALE and op.settings["factor"] == 1:
            return op.inputs[0]
        if op.kind == CONCAT:
            op = replace(op, inputs=tuple(inner for index in op.inputs for inner in self._parts(index, op.settings)))
        self.ops.append(op)
        return len(self.ops) - 1

    def _parts(self, index: int, settings: Settings) -> tuple[int, ...]:
        """Return the inputs of a concatenation with these settings, or else the operator itself."""
        op = self.ops[index]
        return op.inputs if op.kind == CONCAT and op.settings == settings else (index,)


class _Tracer(fx.Tracer):
    def is_leaf_module(self, module: nn.Module, path: str) -> bool:
        return not any(module.children()) or isinstance(module, SpatialTransformer)


def graph_of(model: nn.Module) -> Graph:
    """Return the graph of one of Echelon's networks."""
    graph = Graph()
    graph.output = _add_module(graph, model, "", graph.add(Op(INPUT, "data")))
    return graph


def _add_module(graph: Graph, model: nn.Module, path: str, data: int) -> int:
    """Add the operators of a module with that input, and return the index of its output."""
    places: dict[fx.Node, int] = {}
    for node in _Tracer().trace(model).nodes:
        inputs = tuple(places[one] for one in node.all_input_nodes)
        if node.op == "placeholder":
            places[node] = data
        elif node.op == "call_module":
            module, own = model.get_submodule(str(node.target)), f"{path}{node.target}"
            places[node] = _add_layer(graph, module, own, inputs[0])
        elif node.op == "call_function":
            kind, settings = _FUNCTIONS[node.target](node)
            places[node] = graph.add(Op(kind, f"{path}{node.name}", inputs, settings))
    return inputs[0]  # of the node "output"


_FUNCTIONS: dict[Any, Callable[[fx.Node], tuple[str, Settings]]] = {
    operator.add: lambda node: (ADD, {}),
    operator.mul: lambda node: (SCALE, {"factor": node.args[1]}),
    torch.cat: lambda node: (CONCAT, {}),
}


def _add_layer(graph: Graph, module: nn.Module, path: str, data: int) -> int:
    if isinstance(module, nn.Dropout | nn.Flatten | nn.Identity):
        return data
    if isinstance(module, SpatialTransformer):
        located = _add_module(graph, module.locate, f"{path}.locate.", data)
        affine = _add_layer(graph, module.affine, f"{path}.affine", located)
        return graph.add(Op(TRANSFORMER, path, (data, affine)))
    kind, settings = _layer(module)
    return graph.add(Op(kind, path, (data,), settings))


def _layer(module: nn.Module) -> tuple[str, Settings]:
    """Return the operator of a layer, in the words of `symbol`."""
    match module:
        case nn.Conv2d():
            settings = {"filters": module.out_channels, "kernel": module.kernel_size, "stride": module.stride}
            settings |= {"pad": module.padding, "dilate": module.dilation, "groups": module.groups}
            return CONV, settings | {"bias": module.bias is not None}
        case nn.Linear():
            return LINEAR, {"units": module.out_features, "bias": module.bias is not None}
        case nn.BatchNorm2d():
            return NORM, {"eps": module.eps, "fix_gamma": not module.weight.requires_grad}
        case nn.MaxPool2d() | nn.AvgPool2d():
            kind = "max" if isinstance(module, nn.MaxPool2d) else "avg"
            sizes = {"kernel": module.kernel_size, "stride": module.stride, "pad": module.padding}
            return POOL, {"type": kind, **{name: _pair(size) for name, size in sizes.items()}}
        case nn.AdaptiveAvgPool2d():
            return POOL, {"type": "avg", "global": True}
        case nn.LocalResponseNorm():
            return LRN, {"size": module.size, "alpha": module.alpha, "beta": module.beta, "k": module.k}
        case nn.ReLU() | nn.Tanh():
            return ACTIVATION, {"function": type(module).__name__.lower()}
        case nn.ReLU6():
            return ACTIVATION, {"function": "clip", "from": 0.0, "to": 6.0}
    raise AssertionError(f"a network has a layer of the unknown type {type(module).__name__}")


def _pair(size: int | Size) -> Size:
    return (size, size) if isinstance(size, int) else size


def pair(theirs: Graph, ours: Graph, size_at: Callable[[str], Size]) -> dict[str, Op]:
    """Return MXNet's operator for every operator of our graph, by our name; raises DataError if the graphs differ.

    `size_at` returns the height and width of the input of one of our layers.
    """
    order = _Signatures()
    their_order, our_order = order.of(theirs), order.of(ours)
    found: dict[int, int] = {}  # their index by ours
    differences: list[tuple[int, str]] = []
    open_pairs = [(theirs.output, ours.output)]
    while open_pairs:
        their_index, our_index = open_pairs.pop()
        their_op, our_op = theirs.ops[their_index], ours.ops[our_index]
        if our_index in found:
            if found[our_index] != their_index:
                raise _different(their_op, our_op, f"so is {theirs.ops[found[our_index]].name!r}")
            continue
        found[our_index] = their_index
        if their_op.kind != our_op.kind or len(their_op.inputs) != len(our_op.inputs):
            raise _different(their_op, our_op)
        if what := _settings_that_differ(their_op, our_op, size_at):
            differences.append((their_index, what))
        inputs = (their_op.inputs, our_op.inputs)
        if our_op.kind == ADD:  # the order of terms does not matter
            inputs = (_sorted(their_op.inputs, their_order), _sorted(our_op.inputs, our_order))
        open_pairs += zip(*inputs, strict=True)
    if differences:
        more = f"; {len(differences) - 1} more operators differ" if len(differences) > 1 else ""
        raise DataError(f"{min(differences)[1]}{more}")
    if len(set(found.values())) < len(found):
        raise DataError("one operator of the symbol file takes the place of several layers of the network")
    return {ours.ops[our_index].name: theirs.ops[their_index] for our_index, their_index in found.items()}


class _Signatures:
    """Numbers subgraphs by their structure: equal structures of any graph have the same number."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, tuple[int, ...]], int] = {}

    def of(self, graph: Graph) -> list[int]:
        """Return the numbers of all operators of a graph."""
        found: list[int] = []
        for op in graph.ops:
            inputs = tuple(found[index] for index in op.inputs)
            key = (op.kind, tuple(sorted(inputs)) if op.kind == ADD else inputs)
            found.append(self._numbers.setdefault(key, len(self._numbers)))
        return found


def _sorted(indices: tuple[int, ...], order: list[int]) -> tuple[int, ...]:
    return tuple(sorted(indices, key=lambda index: order[index]))


def _different(theirs: Op, ours: Op, why: str = "") -> DataError:
    where = f"the {theirs.kind} {theirs.name!r} of the symbol file is where the network has {ours.name!r}"
    if theirs.kind != ours.kind:
        return DataError(f"{where}, which is of the kind {ours.kind}")
    return DataError(f"{where}; {why or f'it has {len(theirs.inputs)} inputs there, {len(ours.inputs)} here'}")


def _settings_that_differ(theirs: Op, ours: Op, size_at: Callable[[str], Size]) -> str:
    """Describe the settings that differ; returns nothing if there are none."""
    names = [name for name in (theirs.settings | ours.settings) if not _equal(name, theirs.settings, ours.settings)]
    if not names or (ours.kind == POOL and _same_windows(theirs.settings, ours.settings, size_at(ours.name))):
        return ""
    if ours.kind == TRANSFORMER and theirs.settings == {"target": size_at(ours.name)}:
        return ""  # the output has the size of the input, as in Echelon
    pairs = ", ".join(
        f"{name} {_shown(theirs.settings, name)} there, {_shown(ours.settings, name)} here" for name in names
    )
    return f"the {theirs.kind} {theirs.name!r} of the symbol file differs from {ours.name!r} of the network: {pairs}"


def _equal(name: str, theirs: Settings, ours: Settings) -> bool:
    left, right = theirs.get(name), ours.get(name)
    if isinstance(left, float) and isinstance(right, float):
        return math.isclose(left, right, rel_tol=1e-6)
    return bool(left == right)


def _shown(settings: Settings, name: str) -> object:
    return settings.get(name, "not set")


def _same_windows(theirs: Settings, ours: Settings, size: Size) -> bool:
    """Compare pooling on an input of that size: a global window is one of the whole input."""
    if theirs.keys() - {"type", "kernel", "stride", "pad", "global", "convention"} or theirs["type"] != ours["type"]:
        return False
    if any(len(theirs.get(name, size)) != len(size) for name in ("kernel", "stride", "pad")):
        return False
    if min(theirs.get("stride", size)) < 1:
        return False
    return _windows(theirs, size) == _windows(ours, size)


def _windows(settings: Settings, size: Size) -> list[tuple[int, ...]]:
    """Return (kernel, padding, number of windows, and stride if there are several) in each direction."""
    if settings.get("global"):
        return [(length, 0, 1, 0) for length in size]
    found: list[tuple[int, ...]] = []
    for kernel, stride, pad, length in zip(settings["kernel"], settings["stride"], settings["pad"], size, strict=True):
        room = length + 2 * pad - kernel
        count = (-(-room // stride) if settings.get("convention") == "full" else room // stride) + 1
        found.append((kernel, pad, count, stride if count > 1 else 0))
    return found
