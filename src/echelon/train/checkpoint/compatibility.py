"""Which checkpoints a run may resume from: the network, the optimizer and, in mid-epoch, the order of samples agree.

A checkpoint of another run is rejected with both values and what to do. Files of older versions lack some values, which
then count as equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from echelon.errors import UsageError
from echelon.train.checkpoint.format import Checkpoint, Tensors
from echelon.train.recipe.optimizers import has_two_formulas
from echelon.train.recipe.options import TrainOptions


def check_network_and_optimizer(
    metadata: Mapping[str, Any], path: str, options: TrainOptions, num_classes: int
) -> None:
    """Reject a checkpoint of another network or optimizer."""
    here = {
        "network": options.network,
        "num_layers": options.num_layers,
        "num_classes": num_classes,
        "network options": _listed(options.network_options),
        "optimizer": options.optimizer.lower(),
        "optimizer style": options.optimizer_style,
    }
    saved = metadata.get("options", {})
    there = {name: metadata.get(name) for name in here} | {
        "network options": _listed(metadata.get("network_options", options.network_options)),
        "optimizer": saved.get("optimizer", options.optimizer).lower(),
        "optimizer style": saved.get("optimizer_style", "torch"),
    }
    if not has_two_formulas(options.optimizer) or "optimizer" not in saved:  # MXNet's files have only weights
        del here["optimizer style"]
    if pairs := _differences(there, here):
        raise UsageError(f"{path} belongs to another run: {pairs}. Give the same flags, or another prefix")


def check_sample_order(metadata: Mapping[str, Any], path: str, order: Mapping[str, int]) -> None:
    """Reject a mid-epoch position in another order of samples. Files of older versions do not store their order."""
    if metadata["samples_done"] and (pairs := _differences(metadata.get("order", order), order)):
        raise UsageError(
            f"{path} was saved in the middle of an epoch, and its samples were in another order: {pairs}. Give the "
            "same flags and data, resume from the end of an epoch (--load-epoch), or give another prefix"
        )


def check_shapes(checkpoint: Checkpoint, path: str, weights: Tensors, image_shape: tuple[int, ...]) -> None:
    """Reject weights of other names or shapes. Another image shape is accepted if no weight depends on it."""
    there, here = _shapes(checkpoint.weights), _shapes(weights)
    if there == here:
        return
    name = next(name for name in (*here, *there) if here.get(name) != there.get(name))
    saved_shape, shape = (
        ",".join(map(str, numbers)) for numbers in (checkpoint.metadata.get("image_shape", "?"), image_shape)
    )
    raise UsageError(
        f"{path} does not fit the network: weight {name} is {there.get(name, 'missing')} there, "
        f"{here.get(name, 'missing')} here; images are {saved_shape} there, {shape} here. Give the same flags, or "
        "another prefix"
    )


def _differences(there: Mapping[str, object], here: Mapping[str, object]) -> str:
    return "; ".join(f"{name} {there[name]} there, {here[name]} here" for name in here if there[name] != here[name])


def _listed(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items()) or "none"


def _shapes(named: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in named.items()}
