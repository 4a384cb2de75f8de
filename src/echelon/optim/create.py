"""Optimizers by MXNet's names and settings: `create("sgd", model.parameters(), learning_rate=0.1, wd=1e-4)`.

The names, settings and defaults are those of `mx.optimizer.create`. Settings of MXNet that have no effect here are
accepted and ignored: weights in half precision always have a float32 copy (`multi_precision`), and gradients are dense
(`lazy_update`).
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

from torch.optim.optimizer import ParamsT

from echelon.errors import UsageError, unknown_name
from echelon.optim.adaptive import AdaDelta, AdaGrad, Adam, Adamax, GroupAdaGrad, Nadam, RMSProp
from echelon.optim.momentum import LBSGD, NAG, SGD, LBSGDByNorm
from echelon.optim.rule import Common, Rule
from echelon.optim.rules import DCASGD, FTML, LAMB, LARS, SGLD, Accumulate, Ftrl, Signum

MXNET: dict[str, type[Rule]] = {  # by the name that MXNet registers
    "sgd": SGD,
    "ccsgd": SGD,
    "nag": NAG,
    "lbsgd": LBSGD,
    "adam": Adam,
    "adagrad": AdaGrad,
    "groupadagrad": GroupAdaGrad,
    "rmsprop": RMSProp,
    "adadelta": AdaDelta,
    "adamax": Adamax,
    "nadam": Nadam,
    "signum": Signum,
    "ftml": FTML,
    "ftrl": Ftrl,
    "dcasgd": DCASGD,
    "lars": LARS,
    "lamb": LAMB,
    "sgld": SGLD,
    "test": Accumulate,
}
_RENAMED = {"learning_rate": "lr", "wd": "weight_decay", "epsilon": "eps"}
_WARMUP_POWERS = {"linear": 1.0, "power2": 2.0, "sqrt": 0.5}  # with another strategy, MXNet does not warm up
_IGNORED = frozenset({"multi_precision", "lazy_update", "num_epochs"})


def create(name: str, params: ParamsT, **settings: Any) -> Rule:
    """Make MXNet's optimizer of that name, in any case, for parameters. Raises UsageError for an unknown setting."""
    if name.lower() not in MXNET:
        raise unknown_name("optimizer", name, MXNET)
    kind, translated = _translated(name.lower(), settings)
    accepted = {*signature(kind).parameters, *Common.__annotations__} - {"params", "common"}
    if unknown := translated.keys() - accepted:
        raise UsageError(
            f"optimizer {name!r} has no setting {', '.join(sorted(unknown))}; it has {', '.join(sorted(accepted))}"
        )
    try:
        return kind(params, **translated)
    except (TypeError, ValueError) as error:
        raise UsageError(f"optimizer {name!r}: {error}") from error


def _translated(name: str, settings: Mapping[str, Any]) -> tuple[type[Rule], dict[str, Any]]:
    """Return the class of an optimizer and MXNet's settings under their names here."""
    kind = MXNET[name]
    found = {_RENAMED.get(key, key): value for key, value in settings.items() if key not in _IGNORED}
    if "beta1" in found or "beta2" in found:
        first, second = signature(kind).parameters["betas"].default
        found["betas"] = (found.pop("beta1", first), found.pop("beta2", second))
    if name == "lbsgd":
        kind = _translate_lbsgd(found)
    return kind, found


def _translate_lbsgd(settings: dict[str, Any]) -> type[Rule]:
    """Express the warm-up of lbsgd in updates, in place, and return the class for its strategy."""
    updates = settings.pop("warmup_epochs", 5) * settings.pop("updates_per_epoch", 32)
    strategy = settings.pop("warmup_strategy", "linear")
    if settings.pop("begin_epoch", 0):
        raise UsageError("lbsgd with begin_epoch: load the optimizer's state, which counts the updates, instead")
    if strategy == "lars":
        return LBSGDByNorm
    settings |= {"warmup_power": _WARMUP_POWERS.get(strategy), "warmup_updates": updates}
    return LBSGD
