"""Optimizers by MXNet's names, as torch optimizers, with MXNet's rule of what decays.

Weights (two dimensions or more) and the gammas of norms decay; biases and betas do not, nor does any other parameter of
one dimension. Settings other than learning rate, momentum and decay are the defaults: torch's for what torch.optim has,
MXNet's for what is in echelon.optim. Two things are torch's too: momentum of sgd and nag keeps gradients rather than
steps, so it does not remember the learning rate of before a change; and lbsgd is plain SGD here: its large-batch
warm-up is the schedule's (`schedules.make_schedule(warmup_scale=...)`), unless that is by `lars`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn, optim
from torch.nn.modules.batchnorm import _NormBase

from echelon.errors import UsageError
from echelon.optim import DCASGD, FTML, LAMB, LARS, LBSGD, SGLD, Accumulate, Ftrl, Signum
from echelon.suggestions import unknown_name

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
    "signum": Signum,
    "ftml": FTML,
    "ftrl": Ftrl,
    "dcasgd": DCASGD,
    "lars": LARS,
    "lamb": LAMB,
    "sgld": SGLD,
    "test": Accumulate,
}
NAMES = tuple(_MAKERS)
MOMENTUM = frozenset({"sgd", "ccsgd", "nag", "lbsgd", "dcasgd", "signum"})  # MXNet's scripts give it to no other
ON_ONE_SERVER = frozenset({"lars", "lamb"})  # several would cut parameters, whose norms these need
ON_SERVERS = MOMENTUM | {"adam", "adamw", "rmsprop", "adagrad", "ftml", "ftrl", "test"}  # there is a kernel for these
_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def make_optimizer(
    name: str,
    model: nn.Module,
    *,
    lr: float,
    momentum: float = 0.9,
    weight_decay: float = 0.0001,
    warmup_strategy: str = "linear",
    batch_size: int = 1,
    seed: int = 0,
) -> optim.Optimizer:
    """The optimizer of that name (case does not matter) for what the model trains.

    `warmup_strategy` and `batch_size` (of all workers) are for lbsgd, `seed` is for sgld's noise.
    """
    check_optimizer(name)
    if not weight_decay >= 0:
        raise UsageError(f"--wd {weight_decay}: weight decay must be 0 or more")
    known = name.lower()
    settings: dict[str, Any] = {"lr": lr}
    make = _MAKERS[known]
    if known in MOMENTUM:
        settings["momentum"] = momentum
    if known == "nag" and not momentum:
        make = optim.SGD  # looking ahead along no momentum is plain SGD, and torch refuses to call it anything else
    if warms_up_by_norm(name, warmup_strategy):
        make, settings["batch_size"] = LBSGD, batch_size
    if known == "sgld":
        settings["seed"] = seed
    groups = _lars_groups if known == "lars" else _groups
    try:
        return make(groups(model, weight_decay), **settings)
    except ValueError as error:
        raise UsageError(f"optimizer {name!r} with {_shown(settings)}: {error}") from error


def check_optimizer(name: str) -> None:
    """A name we do not have is an error that says which there are."""
    if name.lower() not in _MAKERS:
        raise unknown_name("optimizer", name, NAMES)


def check_on_servers(name: str, num_servers: int, warmup_strategy: str = "linear") -> None:
    """What so many servers cannot run is an error that says what to do."""
    known = name.lower()
    whole = known in ON_ONE_SERVER or warms_up_by_norm(name, warmup_strategy)
    if whole and num_servers > 1:
        raise UsageError(
            f"the optimizer {name!r} needs the norm of whole parameters, which {num_servers} servers cut: start the "
            "job with one server (-s 1), or use a --kv-store without servers, such as dist_device_sync"
        )
    if known not in ON_SERVERS | ON_ONE_SERVER:
        raise UsageError(
            f"servers cannot run the optimizer {name!r}; use one of {', '.join(sorted(ON_SERVERS | ON_ONE_SERVER))}"
        )


def warms_up_by_norm(name: str, warmup_strategy: str) -> bool:
    """lbsgd's strategy `lars` is no schedule: the rate of every parameter depends on its norm, from first to last."""
    return name.lower() == "lbsgd" and warmup_strategy == "lars"


def decays(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay is for this parameter, which the module itself holds under that name."""
    if name.endswith("bias"):
        return False
    return parameter.dim() > 1 or isinstance(module, _NORMS)


def _groups(model: nn.Module, weight_decay: float) -> list[Group]:
    """What decays and what does not; one group where that is the same, since every group is a call by itself."""
    decaying: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for module, name, parameter in _trained(model):
        (decaying if weight_decay and decays(module, name, parameter) else others).append(parameter)
    groups: list[Group] = [
        {"params": decaying, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return _filled(model, groups)


def _lars_groups(model: nn.Module, weight_decay: float) -> list[Group]:
    """MXNet's other rule, for LARS: only weights decay and get a rate of their own; norms do neither."""
    weights: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for module, name, parameter in _trained(model):
        (weights if decays(module, name, parameter) and parameter.dim() > 1 else others).append(parameter)
    groups: list[Group] = [
        {"params": weights, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0, "eta": None},
    ]
    return _filled(model, groups)


def _filled(model: nn.Module, groups: list[Group]) -> list[Group]:
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
