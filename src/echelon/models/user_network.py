"""A user's own network, `package.module:function`: how it is found, and errors for one that cannot be trained.

An error here is in the user's code, so it names the user's file and line and shows no traceback of Echelon.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from copy import deepcopy
from traceback import extract_tb
from types import ModuleType
from typing import TYPE_CHECKING

from echelon.errors import UsageError, unknown_name

if TYPE_CHECKING:
    import torch
    from torch import nn

_NUM_TRIED = 2  # images: torch's batch norm cannot train on one


def find(network: str, path: str, name: str) -> Callable[..., object]:
    """Return the function or class of that name in a user's module."""
    module = _import(network, path)
    function = getattr(module, name, None)
    if function is None:
        public = (key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise unknown_name(f"function in {path!r}:", name, sorted(public))
    if not callable(function):
        raise UsageError(f"Network {network!r}: {name!r} is a {type(function).__name__}, not a function.")
    from torch import nn

    if isinstance(function, nn.Module):
        raise UsageError(
            f"Network {network!r}: {name!r} is already a network (a {type(function).__name__}); name a function or "
            "class that makes one. It is called with those of num_classes, image_shape and num_layers it accepts."
        )
    found: Callable[..., object] = function
    return found


def _import(network: str, path: str) -> ModuleType:
    try:
        return importlib.import_module(path)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{path}.".startswith(f"{error.name}."):
            raise UsageError(
                f"Network {network!r}: cannot import {path!r} ({error}). Is its directory on PYTHONPATH?"
            ) from error
        text = error.msg if isinstance(error, SyntaxError) else str(error)
        failure = f"{type(error).__name__}: {text}"
        raise UsageError(f"Network {network!r}: importing {path!r} failed: {failure} ({_places(error)}).") from error


def _places(error: Exception) -> str:
    """Return file and line in the named module, and of the code that raised the error if that is another file."""
    lines = {
        frame.filename: frame.lineno  # the innermost of several frames in a file
        for frame in extract_tb(error.__traceback__)
        if frame.filename not in (__file__, importlib.__file__) and not frame.filename.startswith("<frozen ")
    }
    if isinstance(error, SyntaxError) and error.filename:
        lines |= {error.filename: error.lineno}
    places = [f"{filename}, line {line}" for filename, line in lines.items()]
    return ", from ".join(dict.fromkeys((*places[:1], *places[-1:]))) or "before its first line"


def check_sizes(network: str, model: nn.Module) -> None:
    """Raise an error for parameters that get their size in the first forward pass, which optimizers reject."""
    from torch.nn.parameter import is_lazy

    if lazy := [name for name, parameter in model.named_parameters() if is_lazy(parameter)]:
        raise UsageError(
            f"Network {network!r} has parameters without a size ({', '.join(lazy)}). Use layers with explicit sizes, "
            "nn.Linear instead of nn.LazyLinear, or run one image through the network in your function."
        )


def check_outputs(
    network: str, model: nn.Module, num_classes: int, image_shape: tuple[int, ...], device: torch.device
) -> None:
    """Raise an error if the outputs cannot be compared with labels.

    A copy of the model is run, because a forward pass in training mode changes a model.
    """
    import torch

    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
            outputs = deepcopy(model).train()(torch.zeros(_NUM_TRIED, *image_shape, device=device))
    except Exception:  # the first step raises it again, with the user's traceback and a real batch
        return
    expected = (_NUM_TRIED, num_classes)
    if not isinstance(outputs, torch.Tensor):
        raise UsageError(
            f"Network {network!r} returns a {type(outputs).__name__} in training mode, not a tensor of shape "
            f"{expected} for {_NUM_TRIED} images; return only the outputs before softmax."
        )
    shape = tuple(outputs.shape)
    if len(shape) != 2 or shape[0] != _NUM_TRIED or shape[1] < num_classes:
        raise UsageError(
            f"Network {network!r} returns outputs of shape {shape} for {_NUM_TRIED} images, not {expected}, one for "
            f"each of {num_classes} classes; use num_classes in the network, or give --num-classes."
        )
