"""From MXNet's `prefix-0012.params` to a checkpoint of Echelon, and from a network to the arrays of such a file.

If `prefix-symbol.json` is beside the file, layers are paired by its graph (`graph`), otherwise by the names of MXNet's
scripts (`names`). Every array of the file must belong to one tensor of the network, and the reverse, or nothing is
loaded. Weights become float32. The scale of a batch norm with `fix_gamma` counts as 1, whatever the file has, as in
MXNet.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from echelon import models
from echelon.data.records.class_file import read_class_names
from echelon.errors import DataError, UsageError
from echelon.models.layers import Shape
from echelon.train.checkpoint.format import Checkpoint, Tensors
from echelon.train.checkpoint.mxnet import params, symbol
from echelon.train.checkpoint.mxnet.graph import CONV, LINEAR, Graph, Size, graph_of, pair
from echelon.train.checkpoint.mxnet.names import LAYERS, array_names, renumbered, suffixes
from echelon.train.checkpoint.mxnet.params import SUFFIX
from echelon.train.checkpoint.mxnet.recognise import Ends, Network, Wanted, recognise

__all__ = ["SUFFIX", "arrays_of", "describe", "find_file", "load", "symbol_file"]

# The preprocessing of MXNet's scripts: train_mnist.py divides by 255, the others subtract a mean.
_MEAN, _STD = (123.68, 116.779, 103.939), (1.0, 1.0, 1.0)
_GREY_MEAN, _GREY_STD = (0.0,), (255.0,)

_EPOCH = re.compile(r"(.+)-(\d{4,})")
_AUXILIARY = ("running_mean", "running_var")
_MAX_LISTED = 3


def load(path: str | os.PathLike[str], wanted: Wanted | Network | None = None) -> Checkpoint:
    """Read a .params file as a checkpoint. What `wanted` does not say is recognised by the arrays."""
    arrays = _without_prefixes(params.load(path), path)
    symbol_path = symbol_file(path)
    graph = symbol.load(symbol_path) if symbol_path.is_file() else None
    try:
        found, weights = _read(arrays, graph, wanted or Wanted())
    except (DataError, UsageError) as error:
        with_symbol = f" (with {symbol_path.name})" if graph else f" (there is no {symbol_path.name})"
        raise type(error)(f"{os.fspath(path)}{with_symbol}: {error}") from error
    metadata = _metadata(found, _epoch(path), Path(path).name) | {"classes": list(read_class_names(path))}
    return Checkpoint(weights, metadata=metadata)


def _without_prefixes(arrays: Tensors, path: str | os.PathLike[str]) -> Tensors:
    """Return the arrays without `arg:` and `aux:` in their names, which some programs do not write."""
    found = {name.removeprefix("arg:").removeprefix("aux:"): array for name, array in arrays.items()}
    if len(found) < len(arrays):
        raise DataError(f"{os.fspath(path)} has arrays whose names differ only by arg: and aux:")
    return found


def find_file(prefix: str | os.PathLike[str], epoch: int | None = None) -> Path | None:
    """Return the .params file of a prefix and epoch, or else the one of the latest epoch; None if there is none."""
    folder, start = Path(prefix).parent, Path(prefix).name
    pattern = re.compile(re.escape(start) + r"-(\d{4,})" + re.escape(SUFFIX))
    found = {int(match[1]): folder / match[0] for name in _listed_files(folder) if (match := pattern.fullmatch(name))}
    return found.get(max(found, default=0) if epoch is None else epoch)


def _listed_files(folder: Path) -> list[str]:
    return os.listdir(folder) if folder.is_dir() else []


def symbol_file(path: str | os.PathLike[str]) -> Path:
    """Return the name of the symbol file that belongs to a .params file."""
    stem = Path(path).name.removesuffix(SUFFIX)
    match = _EPOCH.fullmatch(stem)
    return Path(path).with_name(f"{match[1] if match else stem}{symbol.SUFFIX}")


def describe(checkpoint: Checkpoint, path: str | os.PathLike[str]) -> str:
    """Return one sentence on the network that was read from a .params file, and on its preprocessing."""
    found = checkpoint.metadata
    depth = f" with {found['num_layers']} layers" if found["num_layers"] else ""
    shape, mean, std = (
        ",".join(f"{number:g}" for number in numbers)
        for numbers in (found["image_shape"], found["options"]["rgb_mean"], found["options"]["rgb_std"])
    )
    by = symbol_file(path)
    pairing = by.name if by.is_file() else f"the names of MXNet's script, because there is no {by.name}"
    return (
        f"{os.fspath(path)} holds MXNet's {found['network']}{depth} for {found['num_classes']} classes and images of "
        f"{shape} (layers are paired by {pairing}); unless you say otherwise, images are normalised as in MXNet's "
        f"scripts, with mean {mean} and std {std}"
    )


def arrays_of(network: str, model: nn.Module) -> Tensors:
    """Return the weights of a network under the names that MXNet's script gives them."""
    state = model.state_dict()
    return {
        f"{'aux' if own.rpartition('.')[2] in _AUXILIARY else 'arg'}:{name}": state[own]
        for own, name in array_names(network, model).items()
    }


def _read(arrays: Tensors, graph: Graph | None, wanted: Wanted | Network) -> tuple[Network, Tensors]:
    names = {name: name for name in arrays} if graph else renumbered(arrays)
    by_name = {names[name]: array for name, array in arrays.items()}
    shapes = {name: tuple(array.shape) for name, array in by_name.items()}
    ends = _ends(graph) if graph else None
    found = wanted if isinstance(wanted, Network) else recognise(shapes, wanted, ends)
    if found.network not in models.names():
        raise UsageError(f"files of MXNet are read only for Echelon's networks, not for {found.network!r}")
    with torch.device("meta"):
        model = models.build(
            found.network,
            num_classes=found.num_classes,
            image_shape=found.image_shape,
            num_layers=found.num_layers,
            **found.network_options,
        )
    pairs = _pairs_by_graph(graph, model, found.image_shape) if graph else array_names(found.network, model)
    return found, _weights(model, pairs, by_name)


def _ends(graph: Graph) -> Ends | None:
    """Return the weights of the first and last layer of a graph."""
    first = next((op for op in graph.ops if op.kind in (CONV, LINEAR) and op.arrays), None)
    last = graph.ops[graph.output]
    return Ends(first.arrays[0], last.arrays[0]) if first and last.kind == LINEAR and last.arrays else None


def _pairs_by_graph(graph: Graph, model: nn.Module, image_shape: Shape) -> dict[str, str]:
    """Return the array of every tensor of the model, after all operators were compared."""
    pairs: dict[str, str] = {}
    found = pair(graph, graph_of(model), partial(_size_at, model=model, image_shape=image_shape))
    for path, module in model.named_modules():
        if isinstance(module, LAYERS):
            own_names, arrays = list(suffixes(module)), found[path].arrays
            if len(arrays) != len(own_names):
                raise DataError(
                    f"{found[path].name!r} of the symbol file has {len(arrays)} weights, not {len(own_names)}"
                )
            pairs |= {f"{path}.{own}": array for own, array in zip(own_names, arrays, strict=True)}
    return pairs


class _ReachedError(Exception):
    """Ends a forward pass at the layer whose input is wanted."""


def _size_at(path: str, model: nn.Module, image_shape: Shape) -> Size:
    """Return the height and width of the input of one of the model's layers."""

    def stop(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        raise _ReachedError(*inputs[0].shape[-2:])

    hook = model.get_submodule(path).register_forward_pre_hook(stop)
    try:
        with torch.no_grad():
            model.eval()(torch.empty(1, *image_shape, device="meta"))
    except _ReachedError as reached:
        height, width = reached.args
        return height, width
    finally:
        hook.remove()
    raise AssertionError(f"the forward pass does not use {path}")


def _weights(model: nn.Module, pairs: Mapping[str, str], arrays: Tensors) -> Tensors:
    """Return the state of the model; raises DataError unless names and shapes agree completely."""
    state = model.state_dict()
    expected = {array: tuple(state[own].shape) for own, array in pairs.items()}
    _check_fit(expected, {name: tuple(array.shape) for name, array in arrays.items()})
    if wrong := [name for name, array in arrays.items() if not array.is_floating_point()]:
        raise DataError(f"the array {wrong[0]!r} is {arrays[wrong[0]].dtype}; weights are floating-point numbers")
    weights = {
        own: arrays[pairs[own]].float() if own in pairs else _initial(own, tensor) for own, tensor in state.items()
    }
    for path, module in model.named_modules():
        if isinstance(module, nn.BatchNorm2d) and not module.weight.requires_grad:
            weights[f"{path}.weight"] = torch.ones_like(weights[f"{path}.weight"])
    return weights


def _initial(own: str, tensor: Tensor) -> Tensor:
    """Return the count of batches, which torch's batch norm has and MXNet's does not."""
    assert own.endswith(".num_batches_tracked"), own
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


def _check_fit(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    missing = [f"{name} {shape}" for name, shape in expected.items() if name not in found]
    extra = [f"{name} {shape}" for name, shape in found.items() if name not in expected]
    other = [
        f"{name} is {found[name]} in the file, {shape} in the network"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    parts = [("missing in the file", missing), ("only in the file", extra), ("of another shape", other)]
    if any(names for _, names in parts):
        text = "; ".join(f"{what}: {_listed(names)}" for what, names in parts if names)
        raise DataError(
            f"its arrays do not fit the network; {text}. Check --network, --num-layers, --num-classes and "
            "--image-shape, all of which `echelon convert` takes"
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more


def _epoch(path: str | os.PathLike[str]) -> int:
    match = _EPOCH.fullmatch(Path(path).name.removesuffix(SUFFIX))
    return int(match[2]) if match else 0


def _metadata(found: Network, epoch: int, source: str) -> dict[str, Any]:
    grey = found.image_shape[0] == 1
    preprocessing = {
        "image_shape": list(found.image_shape),
        "rgb_mean": list(_GREY_MEAN if grey else _MEAN),
        "rgb_std": list(_GREY_STD if grey else _STD),
    }
    return {
        "epoch": epoch,
        "batch": 0,
        "samples_done": 0,
        "network": found.network,
        "num_classes": found.num_classes,
        "image_shape": list(found.image_shape),
        "num_layers": found.num_layers,
        "network_options": found.network_options,
        "options": preprocessing,
        "source": source,
    }
