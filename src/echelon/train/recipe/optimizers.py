"""Optimizers by name, in torch's or MXNet's style, with MXNet's rule for weight decay.

Several names stand for two formulas (`--optimizer-style`). "torch" means those of torch.optim, with its defaults.
"mxnet" means those of `echelon.optim`, which give the weights of a run under MXNet; it is the default of the scripts
with MXNet's flags. Optimizers that only one of the two has are the same in both styles.

Weight decay applies to weights (two or more dimensions) and to the gammas of normalization layers, but not to biases,
betas and other one-dimensional parameters. Settings other than learning rate, momentum and weight decay have their
defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from torch import nn, optim
from torch.nn.modules.batchnorm import _NormBase

from echelon.errors import UsageError, unknown_name
from echelon.kvstore.optimizer_spec import runs_on_servers
from echelon.optim import Rule, create
from echelon.optim.create import MXNET
from echelon.train.recipe.plan import LargeBatch

Group = dict[str, Any]

_TORCH: dict[str, type[optim.Optimizer]] = {
    "sgd": optim.SGD,
    "ccsgd": optim.SGD,
    "nag": optim.SGD,
    "adam": optim.Adam,
    "adamw": optim.AdamW,
    "rmsprop": optim.RMSprop,
    "adagrad": optim.Adagrad,
    "adadelta": optim.Adadelta,
    "adamax": optim.Adamax,
    "nadam": optim.NAdam,
}
NAMES = tuple(dict.fromkeys([*_TORCH, *MXNET]))
MOMENTUM = frozenset({"sgd", "ccsgd", "nag", "lbsgd", "dcasgd", "signum"})  # MXNet's scripts pass it to no other
_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def make_optimizer(
    name: str,
    model: nn.Module,
    *,
    lr: float,
    momentum: float = 0.9,
    weight_decay: float = 0.0001,
    style: str = "torch",
    clip_gradient: float | None = None,
    large_batch: LargeBatch | None = None,
    seed: int = 0,
) -> optim.Optimizer:
    """Make the optimizer of that name, in any case, for the model's trainable parameters.

    lbsgd uses `large_batch`, sgld uses `seed` for its noise.
    """
    check_optimizer(name, style, clip_gradient, weight_decay)
    if not weight_decay >= 0:
        raise UsageError(f"--wd {weight_decay}: weight decay must be 0 or more")
    known, kind = name.lower(), _class_of(name, style)
    settings: dict[str, Any] = {"lr": lr}
    make: Callable[..., optim.Optimizer] = kind
    if known in MOMENTUM:
        settings["momentum"] = momentum
    if known == "nag" and kind is optim.SGD:
        settings["nesterov"] = momentum > 0  # without momentum it is plain SGD, and torch rejects the combination
    if known == "sgld":
        settings["seed"] = seed
    if clip_gradient is not None:
        settings["clip_gradient"] = clip_gradient
    if known == "lbsgd":
        make, settings = _make_lbsgd, settings | asdict(large_batch or LargeBatch())
    groups = _lars_groups if known == "lars" else _groups
    try:
        return make(groups(model, weight_decay), **settings)
    except ValueError as error:
        raise UsageError(f"optimizer {name!r} with {_shown(settings)}: {error}") from error


def check_optimizer(
    name: str, style: str = "torch", clip_gradient: float | None = None, weight_decay: float = 0.0
) -> None:
    """Raise UsageError for an unknown optimizer, or one that cannot clip gradients or decay weights."""
    if name.lower() not in NAMES:
        raise unknown_name("optimizer", name, NAMES)
    if clip_gradient is not None and not issubclass(_class_of(name, style), Rule):
        other = "; give --optimizer-style mxnet, too" if name.lower() in MXNET else ""
        raise UsageError(f"--clip-gradient {clip_gradient:g}: torch's {name} does not clip gradients{other}")
    if name.lower() == "groupadagrad" and weight_decay:
        raise UsageError(f"--wd {weight_decay:g}: groupadagrad has no weight decay, as in MXNet; give --wd 0")


def check_on_servers(name: str) -> None:
    """Raise UsageError if servers cannot run the optimizer, in either style."""
    if not runs_on_servers(_class_of(name, "torch")):
        possible = sorted(other for other in NAMES if runs_on_servers(_class_of(other, "torch")))
        raise UsageError(f"servers cannot run the optimizer {name!r}; use one of {', '.join(possible)}")


def has_two_formulas(name: str) -> bool:
    """Return whether an optimizer depends on `--optimizer-style`."""
    return name.lower() in _TORCH and name.lower() in MXNET


def _class_of(name: str, style: str) -> type[optim.Optimizer]:
    first, second = (MXNET, _TORCH) if style == "mxnet" else (_TORCH, MXNET)
    known = name.lower()
    return first[known] if known in first else second[known]


def _make_lbsgd(groups: list[Group], *, lr: float, batch_size: int, **settings: Any) -> Rule:
    by_norm = {"batch_size": batch_size} if settings["warmup_strategy"] == "lars" else {}
    return create("lbsgd", groups, learning_rate=lr, **settings, **by_norm)


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
