"""A user's own network, `package.module:function`: finding it, and a sentence for what keeps it from being trained.

The user's code is at fault here, so a sentence names its file and line, and none of our frames is shown.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from copy import deepcopy
from traceback import extract_tb
from types import ModuleType
from typing import TYPE_CHECKING

from echelon.errors import UsageError
from echelon.suggestions import unknown_name

if TYPE_CHECKING:
    import torch
    from torch import nn

_TRIED = 2  # images: torch's batch norm does not train on one


def find(network: str, path: str, name: str) -> Callable[..., object]:
    """The function or class of that name in a user's module."""
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
            f"Network {network!r}: {name!r} is a network already, a {type(function).__name__}; name a function or "
            "class that makes one: it gets num_classes, image_shape and num_layers, those that it takes."
        )
    found: Callable[..., object] = function
    return found


def _import(network: str, path: str) -> ModuleType:
    try:
        return importlib.import_module(path)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{path}.".startswith(f"{error.name}."):
            raise UsageError(
                f"Network {network!r}: cannot import {path!r} ({error}). Is its folder on PYTHONPATH?"
            ) from error
        text = error.msg if isinstance(error, SyntaxError) else str(error)
        said = f"{type(error).__name__}: {text}"
        raise UsageError(f"Network {network!r}: importing {path!r} failed: {said} ({_places(error)}).") from error


def _places(error: Exception) -> str:
    """File and line in the module that was named, and where the error came from, if that is another."""
    lines = {
        frame.filename: frame.lineno  # of several frames in a file, the innermost
        for frame in extract_tb(error.__traceback__)
        if frame.filename not in (__file__, importlib.__file__) and not frame.filename.startswith("<frozen ")
    }
    if isinstance(error, SyntaxError) and error.filename:
        lines |= {error.filename: error.lineno}
    places = [f"{filename}, line {line}" for filename, line in lines.items()]
    return ", from ".join(dict.fromkeys((*places[:1], *places[-1:]))) or "before its first line"


def check_sizes(network: str, model: nn.Module) -> None:
    """Refuse parameters that get their size in a first forward pass: an optimizer cannot have them."""
    from torch.nn.parameter import is_lazy

    if lazy := [name for name, parameter in model.named_parameters() if is_lazy(parameter)]:
        raise UsageError(
            f"Network {network!r} has parameters without a size yet ({', '.join(lazy)}). Give its layers their sizes, "
            "as nn.Linear does and nn.LazyLinear does not, or let an image pass through it in your function."
        )


def check_outputs(
    network: str, model: nn.Module, num_classes: int, image_shape: tuple[int, ...], device: torch.device
) -> None:
    """Refuse what cannot be compared with labels, as a copy gives it: a forward pass in training changes a model."""
    import torch

    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
            outputs = deepcopy(model).train()(torch.zeros(_TRIED, *image_shape, device=device))
    except Exception:  # the first step shows it, in the user's frames and with the batch that is meant
        return
    wanted = (_TRIED, num_classes)
    if not isinstance(outputs, torch.Tensor):
        raise UsageError(
            f"Network {network!r} gives a {type(outputs).__name__} in training; a tensor is wanted, of {wanted} for "
            f"{_TRIED} images: return the outputs before softmax, and nothing else."
        )
    shape = tuple(outputs.shape)
    if len(shape) != 2 or shape[0] != _TRIED or shape[1] < num_classes:
        raise UsageError(
            f"Network {network!r} gives outputs of {shape} for {_TRIED} images; {wanted} are wanted, one for each of "
            f"{num_classes} classes: heed num_classes, or give --num-classes."
        )
