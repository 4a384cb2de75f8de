"""Builds a network from its name. Importing this module does not import torch or any family of networks.

A name is either in the table below or `package.module:function`, a user's own function. Both are called in the same
way: with those of `num_classes`, `image_shape` and `num_layers` that the function accepts, and with every option that
is given. An option that the function does not accept is an error. An option of None counts as not given.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from echelon.errors import UsageError, unknown_name
from echelon.models import user_network

if TYPE_CHECKING:
    import torch
    from torch import nn

_NETWORKS = {
    "mlp": "classic:mlp",
    "lenet": "classic:lenet",
    "digits-cnn": "classic:digits_cnn",
    "alexnet": "classic:alexnet",
    "vgg": "classic:vgg",
    "googlenet": "classic:googlenet",
    "inception-bn": "inception_bn:inception_bn",
    "inception-bn-28-small": "inception_bn:inception_bn_28_small",
    "inception-bn-full": "inception_bn:inception_bn_full",
    "inception-v3": "inception:inception_v3",
    "inception-v4": "inception:inception_v4",
    "inception-resnet-v2": "inception:inception_resnet_v2",
    "resnet": "resnet:resnet",
    "resnet-v1": "resnet:resnet_v1",
    "resnetv1": "resnet:resnet_v1",  # MXNet has this file under both names
    "resnet-28-small": "resnet:resnet_28_small",
    "resnext": "resnet:resnext",
    "mobilenet": "mobilenet:mobilenet",
    "mobilenetv2": "mobilenet:mobilenetv2",
}
_STANDARD = ("num_classes", "image_shape", "num_layers")


def names() -> tuple[str, ...]:
    """Return the names of Echelon's networks."""
    return tuple(_NETWORKS)


def check_options(network: str, options: Mapping[str, object]) -> None:
    """Raise an error for an option that the network does not accept. Imports its family, but builds nothing."""
    given = {key: value for key, value in options.items() if value is not None}
    _check_options(network, inspect.signature(_find_function(network)).parameters, given)


def build(
    network: str,
    *,
    num_classes: int,
    image_shape: tuple[int, int, int],
    num_layers: int | None = None,
    initializer: str = "default",
    **options: object,
) -> nn.Module:
    """Build the network of that name and initialise it. With "default", a user's network keeps its own weights."""
    _check_arguments(num_classes, image_shape)
    from echelon.models.initializers import initialize, rule_for

    rule_for(initializer, network)  # report an unknown name before the network is built
    function = _find_function(network)
    standard: dict[str, object] = dict(zip(_STANDARD, (num_classes, image_shape, num_layers), strict=True))
    model = _call_function(network, function, standard, options)
    if network in _NETWORKS or initializer != "default":
        initialize(model, initializer, network)
    return model


def check_outputs(
    network: str, model: nn.Module, *, num_classes: int, image_shape: tuple[int, ...], device: torch.device
) -> None:
    """Raise an error for a user's network whose outputs have the wrong type or shape for training."""
    if network not in _NETWORKS:
        user_network.check_outputs(network, model, num_classes, image_shape, device)


def _check_arguments(num_classes: int, image_shape: tuple[int, ...]) -> None:
    if num_classes < 1:
        raise UsageError(f"A network needs at least one class, not {num_classes}.")
    if len(image_shape) != 3 or min(image_shape) < 1:
        raise UsageError(
            f"An image shape is channels,height,width, for example 3,224,224; not {','.join(map(str, image_shape))}."
        )


def _find_function(network: str) -> Callable[..., object]:
    if network in _NETWORKS:
        path, _, name = _NETWORKS[network].partition(":")
        found: Callable[..., object] = getattr(import_module(f"echelon.models.{path}"), name)
        return found
    path, colon, name = network.partition(":")
    if not colon or not all(part.isidentifier() for part in (*path.split("."), name)):
        raise unknown_name("network", network, names(), "name a network of your own as package.module:function")
    return user_network.find(network, path, name)


def _call_function(
    network: str, function: Callable[..., object], standard: dict[str, object], options: dict[str, object]
) -> nn.Module:
    from torch import nn

    given = {key: value for key, value in options.items() if value is not None}
    parameters = inspect.signature(function).parameters
    _check_options(network, parameters, given)
    accepts_all = _accepts_all(parameters)
    given |= {key: value for key, value in standard.items() if value is not None and (accepts_all or key in parameters)}
    if missing := _missing_arguments(parameters, given):
        raise UsageError(f"Network {network!r} needs {', '.join(missing)}, but is only given {', '.join(given)}.")
    positional = [
        given.pop(key, parameter.default)
        for key, parameter in parameters.items()
        if parameter.kind is parameter.POSITIONAL_ONLY
    ]
    model = function(*positional, **given)
    if not isinstance(model, nn.Module):
        raise UsageError(f"Network {network!r} returned a {type(model).__name__}, not a torch.nn.Module.")
    user_network.check_sizes(network, model)
    return model


def _accepts_all(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def _check_options(network: str, parameters: Mapping[str, inspect.Parameter], given: Mapping[str, object]) -> None:
    extra = sorted(given.keys() - parameters.keys())
    if extra and not _accepts_all(parameters):
        accepted = ", ".join(key for key in parameters if key not in _STANDARD) or "none"
        raise UsageError(f"Network {network!r} does not accept {', '.join(extra)}; its options: {accepted}.")


def _missing_arguments(parameters: Mapping[str, inspect.Parameter], given: dict[str, object]) -> list[str]:
    def required(parameter: inspect.Parameter) -> bool:
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        return parameter.default is parameter.empty and not variadic

    return [key for key, parameter in parameters.items() if required(parameter) and key not in given]
