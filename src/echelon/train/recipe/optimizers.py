"""MXNet's optimizers by name, as torch optimizers, with MXNet's rule for weight decay.

Weight decay applies to weights (two or more dimensions) and to the gammas of normalization layers, but not to biases,
betas and other one-dimensional parameters. Settings other than learning rate, momentum and weight decay have their
defaults: torch's for the optimizers of torch.optim, MXNet's for those of echelon.optim.

Two things differ from MXNet. The momentum of sgd and nag accumulates gradients, as in torch, and not steps, so a change
of the learning rate affects it at once. lbsgd is plain SGD, because the schedule does its large-batch warm-up
(`schedules.make_schedule(warmup_scale=...)`), except with the strategy `lars`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn, optim
from torch.nn.modules.batchnorm import _NormBase

from echelon.errors import UsageError, unknown_name
from echelon.kvstore.optimizer_spec import runs_on_servers
from echelon.optim import DCASGD, FTML, LAMB, LARS, LBSGD, SGLD, Accumulate, Ftrl, Rule, Signum
from echelon.train.recipe.schedules import warms_up_by_norm

Group = dict[str, Any]

_CLASSES: dict[str, type[optim.Optimizer]] = {
    "sgd": optim.SGD,
    "ccsgd": optim.SGD,
    "nag": optim.SGD,
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
NAMES = tuple(_CLASSES)
MOMENTUM = frozenset({"sgd", "ccsgd", "nag", "lbsgd", "dcasgd", "signum"})  # MXNet's scripts pass it to no other
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
    """Make the optimizer of that name, in any case, for the model's trainable parameters.

    lbsgd uses `warmup_strategy` and `batch_size` (of all workers), sgld uses `seed` for its noise.
    """
    check_optimizer(name)
    if not weight_decay >= 0:
        raise UsageError(f"--wd {weight_decay}: weight decay must be 0 or more")
    known = name.lower()
    settings: dict[str, Any] = {"lr": lr}
    make: Callable[..., optim.Optimizer] = _CLASSES[known]
    if known in MOMENTUM:
        settings["momentum"] = momentum
    if known == "nag":
        settings["nesterov"] = momentum > 0  # without momentum it is plain SGD, and torch rejects the combination
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
    """Raise UsageError for an unknown optimizer."""
    if name.lower() not in _CLASSES:
        raise unknown_name("optimizer", name, NAMES)


def check_on_servers(name: str, num_servers: int, warmup_strategy: str = "linear") -> None:
    """Raise UsageError if this many servers cannot run the optimizer."""
    kind = LBSGD if warms_up_by_norm(name, warmup_strategy) else _CLASSES[name.lower()]
    if num_servers > 1 and issubclass(kind, Rule) and kind.whole and runs_on_servers(kind):
        raise UsageError(
            f"the optimizer {name!r} needs the norm of whole parameters, but {num_servers} servers split them: start "
            "the job with one server (-s 1), or use a --kv-store without servers, such as dist_device_sync"
        )
    if not runs_on_servers(kind):
        possible = sorted(other for other in NAMES if runs_on_servers(_CLASSES[other]))
        raise UsageError(f"servers cannot run the optimizer {name!r}; use one of {', '.join(possible)}")


def decays(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """Return whether weight decay applies to a module's own parameter of that name."""
    if name.endswith("bias"):
        return False
    return parameter.dim() > 1 or isinstance(module, _NORMS)


def _groups(model: nn.Module, weight_decay: float) -> list[Group]:
    """Split the parameters by weight decay; with one kind only, one group, because each group costs extra kernels."""
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
    """Split the parameters for LARS: only weights decay and have a rate of their own; MXNet excludes norms."""
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
        raise UsageError(f"{type(model).__name__} has no parameter that requires a gradient, so it cannot be trained")
    return found


def _trained(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield every parameter that requires a gradient, once, with the module that holds it."""
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                yield module, name, parameter


def _shown(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())
