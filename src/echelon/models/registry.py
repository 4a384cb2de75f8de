"""From a network's name to a network. Importing this imports no torch; a family's file is imported when it is built.

A name is one of ours or `package.module:function`, a user's own function. Both are called alike: with those of
`num_classes`, `image_shape` and `num_layers` that the function takes, and with every option given. An option it does
not take is an error, since the network without it is not the one asked for; an option of None counts as not given.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from echelon.errors import UsageError
from echelon.models import own
from echelon.suggestions import unknown_name

if TYPE_CHECKING:
    import torch
    from torch import nn

_NETWORKS = {
    "mlp": "mlp:mlp",
    "lenet": "lenet:lenet",
    "digits-cnn": "digits:digits_cnn",
    "alexnet": "alexnet:alexnet",
    "vgg": "vgg:vgg",
    "googlenet": "googlenet:googlenet",
    "inception-bn": "inception_bn:inception_bn",
    "inception-bn-28-small": "inception_bn:inception_bn_28_small",
    "inception-bn-full": "inception_bn:inception_bn_full",
    "inception-v3": "inception_v3:inception_v3",
    "inception-v4": "inception_v4:inception_v4",
    "inception-resnet-v2": "inception_resnet_v2:inception_resnet_v2",
    "resnet": "resnet:resnet",
    "resnet-v1": "resnet_v1:resnet_v1",
    "resnetv1": "resnet_v1:resnet_v1",  # MXNet has this file twice.
    "resnet-28-small": "resnet_v1:resnet_28_small",
    "resnext": "resnext:resnext",
    "mobilenet": "mobilenet:mobilenet",
    "mobilenetv2": "mobilenet:mobilenetv2",
}


_STANDARD = ("num_classes", "image_shape", "num_layers")


def names() -> tuple[str, ...]:
    return tuple(_NETWORKS)


def check_options(network: str, options: Mapping[str, object]) -> None:
    """An error for an option that the network does not take, before it is built. Imports its family's file."""
    given = {key: value for key, value in options.items() if value is not None}
    _check_options(network, inspect.signature(_find(network)).parameters, given)


def build(
    network: str,
    *,
    num_classes: int,
    image_shape: tuple[int, int, int],
    num_layers: int | None = None,
    initializer: str = "default",
    **options: object,
) -> nn.Module:
    """The network of that name, initialised; a user's own network keeps its initialisation under "default"."""
    _check(num_classes, image_shape)
    from echelon.models.initializers import initialize, rule_for

    rule_for(initializer, network)  # A bad name should not cost the building of a network.
    function = _find(network)
    standard: dict[str, object] = dict(zip(_STANDARD, (num_classes, image_shape, num_layers), strict=True))
    model = _call(network, function, standard, options)
    if network in _NETWORKS or initializer != "default":
        initialize(model, initializer, network)
    return model


def check_outputs(
    network: str, model: nn.Module, *, num_classes: int, image_shape: tuple[int, ...], device: torch.device
) -> None:
    """An error for a user's network whose outputs cannot be trained on; ours are as they should be."""
    if network not in _NETWORKS:
        own.check_outputs(network, model, num_classes, image_shape, device)


def _check(num_classes: int, image_shape: tuple[int, ...]) -> None:
    if num_classes < 1:
        raise UsageError(f"A network needs at least one class, not {num_classes}.")
    if len(image_shape) != 3 or min(image_shape) < 1:
        raise UsageError(
            f"An image shape is channels,height,width, as in 3,224,224; not {','.join(map(str, image_shape))}."
        )


def _find(network: str) -> Callable[..., object]:
    if network in _NETWORKS:
        path, _, name = _NETWORKS[network].partition(":")
        found: Callable[..., object] = getattr(import_module(f"echelon.models.{path}"), name)
        return found
    path, colon, name = network.partition(":")
    if not colon or not all(part.isidentifier() for part in (*path.split("."), name)):
        raise unknown_name("network", network, names(), "name a network of your own as package.module:function")
    return own.find(network, path, name)


def _call(
    network: str, function: Callable[..., object], standard: dict[str, object], options: dict[str, object]
) -> nn.Module:
    from torch import nn

    given = {key: value for key, value in options.items() if value is not None}
    parameters = inspect.signature(function).parameters
    _check_options(network, parameters, given)
    takes_all = _takes_all(parameters)
    given |= {key: value for key, value in standard.items() if value is not None and (takes_all or key in parameters)}
    if missing := _missing(parameters, given):
        raise UsageError(f"Network {network!r} needs {', '.join(missing)}, which is not among {', '.join(given)}.")
    positional = [
        given.pop(key, parameter.default)
        for key, parameter in parameters.items()
        if parameter.kind is parameter.POSITIONAL_ONLY
    ]
    model = function(*positional, **given)
    if not isinstance(model, nn.Module):
        raise UsageError(f"Network {network!r} returned a {type(model).__name__}, not a torch.nn.Module.")
    own.check_sizes(network, model)
    return model


def _takes_all(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def _check_options(network: str, parameters: Mapping[str, inspect.Parameter], given: Mapping[str, object]) -> None:
    extra = sorted(given.keys() - parameters.keys())
    if extra and not _takes_all(parameters):
        own = ", ".join(key for key in parameters if key not in _STANDARD) or "none"
        raise UsageError(f"Network {network!r} takes no option {', '.join(extra)}; its options: {own}.")


def _missing(parameters: Mapping[str, inspect.Parameter], given: dict[str, object]) -> list[str]:
    def required(parameter: inspect.Parameter) -> bool:
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        return parameter.default is parameter.empty and not variadic

    return [key for key, parameter in parameters.items() if required(parameter) and key not in given]
