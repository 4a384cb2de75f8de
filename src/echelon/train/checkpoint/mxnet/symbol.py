"""Reads `prefix-symbol.json`, the network that MXNet saves beside its .params files, as a `Graph`.

MXNet changed the field of the settings twice (`param`, `attr`, `attrs`), and before 0.9 the moving statistics of batch
norm were not inputs. All of these are read. Settings that this module does not translate, and that change values,
appear in the graph under MXNet's name, so that the comparison reports them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import msgspec

from echelon.errors import DataError
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
)

SUFFIX = "-symbol.json"

_Texts: TypeAlias = dict[str, str]
_VARIABLE = "null"
_OUTPUTS = ("SoftmaxOutput", "Softmax", "softmax", "SoftmaxActivation", "log_softmax")  # networks here end before it
_TRANSPARENT = ("Flatten", "flatten", "Dropout", "_copy", "identity", "Cast", "cast", "amp_cast", "BlockGrad")
_WEIGHTED = (CONV, LINEAR, NORM)


class _Node(msgspec.Struct):
    op: str
    name: str
    inputs: list[tuple[int, ...]]
    attrs: _Texts = {}
    attr: _Texts = {}
    param: _Texts = {}


class _Symbol(msgspec.Struct):
    nodes: list[_Node]
    heads: list[tuple[int, ...]]


def load(path: str | os.PathLike[str]) -> Graph:
    """Read the graph of a symbol file."""
    try:
        return parse(Path(path).read_bytes())
    except OSError as error:
        raise DataError(f"cannot read the symbol file {os.fspath(path)}: {error.strerror or error}") from error
    except DataError as error:
        raise DataError(f"the symbol file {os.fspath(path)} cannot be used: {error}") from error


def parse(text: bytes) -> Graph:
    """Return the graph of the text of a symbol file, without the softmax at its output."""
    try:
        symbol = msgspec.json.decode(text, type=_Symbol)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"it is not a symbol of MXNet: {error}") from error
    return _Translation(symbol).graph


class _Translation:
    """Translates the nodes that lead to the output."""

    def __init__(self, symbol: _Symbol) -> None:
        self._nodes = symbol.nodes
        self._check_order(symbol)
        head = symbol.heads[0][0]
        while self._nodes[head].op in _OUTPUTS and self._nodes[head].inputs:
            head = self._nodes[head].inputs[0][0]
        self.graph = Graph()
        self._places: dict[int, int] = {}
        for index in sorted(self._ancestors(head)):
            self._places[index] = self._add(self._nodes[index])
        self.graph.output = self._place(head)

    def _check_order(self, symbol: _Symbol) -> None:
        for index, node in enumerate(self._nodes):
            if any(not one or not 0 <= one[0] < index for one in node.inputs):
                raise DataError(f"the inputs of {node.name!r} do not come before it")
        if not symbol.heads or not symbol.heads[0] or not 0 <= symbol.heads[0][0] < len(self._nodes):
            raise DataError("it has no output")

    def _ancestors(self, head: int) -> set[int]:
        """Return the operators that `head` depends on, and `head`."""
        found, waiting = set(), [head]
        while waiting:
            index = waiting.pop()
            if index not in found and self._nodes[index].op != _VARIABLE:
                found.add(index)
                waiting += [one[0] for one in self._nodes[index].inputs]
        return found

    def _add(self, node: _Node) -> int:
        inputs = [one[0] for one in node.inputs]
        if any(one[1:2] not in ((), (0,)) for one in node.inputs):
            raise DataError(f"{node.op} {node.name!r} uses another output of an operator than the first")
        if node.op in _TRANSPARENT and inputs:
            return self._place(inputs[0])
        if node.op not in _OPERATORS or not inputs:
            raise DataError(f"it has the operator {node.op} ({node.name!r}), which none of Echelon's networks has")
        try:
            kind, settings = _OPERATORS[node.op]({**node.param, **node.attr, **node.attrs})
        except (KeyError, ValueError, OverflowError) as error:
            raise DataError(f"the settings of {node.op} {node.name!r} cannot be read: {error!r}") from error
        data = inputs[:1] if kind in _WEIGHTED else inputs
        arrays = tuple(self._variable(index, node) for index in inputs[len(data) :])
        if kind == NORM and len(arrays) == 2:
            arrays += (f"{node.name}_moving_mean", f"{node.name}_moving_var")
        return self.graph.add(Op(kind, node.name, tuple(map(self._place, data)), settings, arrays))

    def _place(self, index: int) -> int:
        """Return the place of a node in the graph. A variable that is not a weight is the input."""
        if index not in self._places:
            self._places[index] = self.graph.add(Op(INPUT, self._nodes[index].name))
        return self._places[index]

    def _variable(self, index: int, user: _Node) -> str:
        node = self._nodes[index]
        while node.op in _TRANSPARENT and node.inputs:
            node = self._nodes[node.inputs[0][0]]
        if node.op != _VARIABLE:
            raise DataError(f"a weight of {user.name!r} is computed by {node.op} {node.name!r}")
        return node.name


def _true(text: str) -> bool:
    return text.strip().lower() in ("1", "true")


def _numbers(text: str) -> tuple[int, ...]:
    """Read a tuple such as (3, 3), or (3L, 3L) of Python 2."""
    return tuple(int(number) for number in re.findall(r"-?\d+", text))


def _unusual(texts: _Texts, **usual: str) -> Settings:
    """Return the settings that differ from their usual values."""
    return {name: texts[name] for name, value in usual.items() if texts.get(name, value) not in (value, "None")}


def _convolution(texts: _Texts) -> tuple[str, Settings]:
    kernel = _numbers(texts.get("kernel", ""))
    ones, zeros = (1,) * len(kernel), (0,) * len(kernel)
    return CONV, {
        "filters": int(texts.get("num_filter", 0)),
        "kernel": kernel,
        "stride": _numbers(texts.get("stride", "")) or ones,
        "pad": _numbers(texts.get("pad", "")) or zeros,
        "dilate": _numbers(texts.get("dilate", "")) or ones,
        "groups": int(texts.get("num_group", 1)),
        "bias": not _true(texts.get("no_bias", "False")),
        **_unusual(texts, layout="NCHW"),
    }


def _fully_connected(texts: _Texts) -> tuple[str, Settings]:
    bias = not _true(texts.get("no_bias", "False"))
    return LINEAR, {"units": int(texts.get("num_hidden", 0)), "bias": bias, **_unusual(texts, flatten="True")}


def _batch_norm(texts: _Texts) -> tuple[str, Settings]:
    settings = {"eps": float(texts.get("eps", 1e-3)), "fix_gamma": _true(texts.get("fix_gamma", "True"))}
    return NORM, settings | _unusual(texts, axis="1")


def _pooling(texts: _Texts) -> tuple[str, Settings]:
    kind = texts.get("pool_type", "max")
    if _true(texts.get("global_pool", "False")):
        return POOL, {"type": kind, "global": True}
    kernel = _numbers(texts.get("kernel", ""))
    settings: Settings = {
        "type": kind,
        "kernel": kernel,
        "stride": _numbers(texts.get("stride", "")) or (1,) * len(kernel),
        "pad": _numbers(texts.get("pad", "")) or (0,) * len(kernel),
    }
    if texts.get("pooling_convention", "valid") != "valid":
        settings["convention"] = texts["pooling_convention"]
    averages = {"count_include_pad": "True"} if kind == "avg" else {}
    return POOL, settings | _unusual(texts, layout="NCHW", **averages)


def _lrn(texts: _Texts) -> tuple[str, Settings]:
    defaults = {"nsize": "0", "alpha": "1e-4", "beta": "0.75", "knorm": "2"}
    given = {name: float(texts.get(name, default)) for name, default in defaults.items()}
    return LRN, {"size": int(given["nsize"]), "alpha": given["alpha"], "beta": given["beta"], "k": given["knorm"]}


def _clip(texts: _Texts) -> tuple[str, Settings]:
    return ACTIVATION, {"function": "clip", "from": float(texts["a_min"]), "to": float(texts["a_max"])}


def _transformer(texts: _Texts) -> tuple[str, Settings]:
    unusual = _unusual(texts, sampler_type="bilinear", transform_type="affine")
    return TRANSFORMER, {"target": _numbers(texts.get("target_shape", "")), **unusual}


def _fixed(kind: str, **settings: object) -> Callable[[_Texts], tuple[str, Settings]]:
    return lambda _: (kind, settings)


_OPERATORS: dict[str, Callable[[_Texts], tuple[str, Settings]]] = {
    "Convolution": _convolution,
    "Convolution_v1": _convolution,
    "FullyConnected": _fully_connected,
    "BatchNorm": _batch_norm,
    "BatchNorm_v1": _batch_norm,
    "CuDNNBatchNorm": _batch_norm,
    "Pooling": _pooling,
    "Pooling_v1": _pooling,
    "LRN": _lrn,
    "Activation": lambda texts: (ACTIVATION, {"function": texts.get("act_type", "")}),
    "relu": _fixed(ACTIVATION, function="relu"),
    "tanh": _fixed(ACTIVATION, function="tanh"),
    "clip": _clip,
    "Concat": lambda texts: (CONCAT, _unusual(texts, dim="1")),
    "concat": lambda texts: (CONCAT, _unusual(texts, dim="1")),
    "elemwise_add": _fixed(ADD),
    "broadcast_add": _fixed(ADD),
    "_Plus": _fixed(ADD),
    "_plus": _fixed(ADD),
    "ElementWiseSum": _fixed(ADD),
    "add_n": _fixed(ADD),
    "_mul_scalar": lambda texts: (SCALE, {"factor": float(texts["scalar"])}),
    "_MulScalar": lambda texts: (SCALE, {"factor": float(texts["scalar"])}),
    "SpatialTransformer": _transformer,
}
