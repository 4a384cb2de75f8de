"""Optimizers by MXNet's names, as torch optimizers, with MXNet's rule of what decays.

Weights (two dimensions or more) and the gammas of norms decay; biases and betas do not, nor does any other parameter of
one dimension. Settings other than learning rate, momentum and decay are torch's defaults. Two things are torch's too:
momentum keeps gradients rather than steps, so it does not remember the learning rate of before a change; and lbsgd is
plain SGD here: its large-batch warm-up is the schedule's (`schedules.make_schedule(warmup_scale=...)`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn, optim
from torch.nn.modules.batchnorm import _NormBase

from echelon.errors import UsageError
from echelon.models.choices import unknown

Group = dict[str, Any]

_MAKERS: dict[str, Callable[..., optim.Optimizer]] = {
    "sgd": optim.SGD,
    "ccsgd": optim.SGD,
    "nag": partial(optim.SGD, nesterov=True),
    "lbsgd": optim.SGD,
    "adam": optim.Adam,
    "adamw": optim.AdamW,
    "rmsprop": optim.RMSprop,
    "adagrad": optim.Adagrad,
    "adadelta": optim.Adadelta,
    "adamax": optim.Adamax,
    "nadam": optim.NAdam,
}
NAMES = tuple(_MAKERS)
MOMENTUM = frozenset({"sgd", "ccsgd", "nag", "lbsgd"})  # the others have their own idea of it, or none
ON_SERVERS = MOMENTUM | {"adam", "adamw", "rmsprop", "adagrad"}  # what a parameter server has a kernel for
_NOT_YET = ("signum", "ftml", "lars", "lamb", "dcasgd", "sgld", "ftrl")
_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def make_optimizer(
    name: str, model: nn.Module, *, lr: float, momentum: float = 0.9, weight_decay: float = 0.0001
) -> optim.Optimizer:
    """The optimizer of that name (case does not matter) for what the model trains."""
    check_optimizer(name)
    known = name.lower()
    settings: dict[str, Any] = {"lr": lr}
    make = _MAKERS[known]
    if known in MOMENTUM:
        settings["momentum"] = momentum
        if not momentum:
            make = optim.SGD  # looking ahead along no momentum is plain SGD, and torch refuses to call it anything else
    try:
        return make(_groups(model, weight_decay), **settings)
    except ValueError as error:
        raise UsageError(f"optimizer {name!r} with {_shown(settings)}: {error}") from error


def check_optimizer(name: str) -> None:
    """A name we do not have is an error that says which there are."""
    if name.lower() in _NOT_YET:
        raise UsageError(f"MXNet has the optimizer {name!r}, Echelon not yet; use one of {', '.join(NAMES)}")
    if name.lower() not in _MAKERS:
        raise unknown("optimizer", name, NAMES)


def decays(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay is for this parameter, which the module itself holds under that name."""
    if name.endswith("bias"):
        return False
    return parameter.dim() > 1 or isinstance(module, _NORMS)


def _groups(model: nn.Module, weight_decay: float) -> list[Group]:
    """What decays and what does not; one group where that is the same, since every group is a call by itself."""
    if not weight_decay >= 0:
        raise UsageError(f"--wd {weight_decay}: weight decay must be 0 or more")
    decaying: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for module, name, parameter in _trained(model):
        (decaying if weight_decay and decays(module, name, parameter) else others).append(parameter)
    groups: list[Group] = [
        {"params": decaying, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    found = [group for group in groups if group["params"]]
    if not found:
        raise UsageError(f"{type(model).__name__} has no parameter that requires a gradient; nothing can be trained")
    return found


def _trained(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Every parameter that requires a gradient, once, with the module that holds it."""
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                yield module, name, parameter


def _shown(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())
