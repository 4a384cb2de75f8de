"""Optimizers as a name and numbers, which are sent to the servers instead of a pickled object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import LBFGS, Adam, Optimizer

from echelon.cluster.messages import OptimizerSpec, Setting
from echelon.errors import UsageError, unknown_name
from echelon.optim import RULES, SGLD, create
from echelon.optim.import_path import ANYWHERE, import_class, is_import_path, path_of
from echelon.optim.torch_classes import TORCH
from echelon.server.optimizer.class_kernels import make_instance, with_tuples
from echelon.server.optimizer.kernels import kernel_for

_CLASSES: dict[str, type[Optimizer]] = TORCH | RULES
_NOT_SENT = {"foreach", "capturable", "differentiable"}
_REJECTED = ("capturable", "differentiable")
_REFUSED: dict[type[Optimizer], str] = {
    LBFGS: "a step evaluates the loss several times, each with the gradients of all workers; train with it in one "
    "process, in a plain loop",
    SGLD: f"its noise is drawn in the worker. {ANYWHERE}",
}


def runs_on_servers(kind: type[Optimizer]) -> bool:
    """Return whether servers have an update for this class of optimizers."""
    return kind in _CLASSES.values()


def needs_whole_tensors(spec: OptimizerSpec) -> bool:
    """Return whether an optimizer cannot update a part of a tensor by itself."""
    return any(kernel_for(spec.name, options, allowed=(spec.name,)).whole for options in spec.groups)


def spec_of(optimizer: Optimizer, names: Mapping[int, str]) -> OptimizerSpec:
    """Return a torch optimizer's class and settings. `names` maps id(parameter) to the parameter's key."""
    name = _name_of(type(optimizer))
    if name == "adam":
        name = _adam_or_adamw(optimizer)
    members: dict[str, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) in names:
                members[names[id(parameter)]] = index
    return OptimizerSpec(name, [_options(optimizer, group) for group in optimizer.param_groups], members)


def _name_of(kind: type[Optimizer]) -> str:
    """Return the name of a class that servers run: that of the tables, or the import path of a user's own class."""
    name = next((name for name, known in _CLASSES.items() if kind is known), None)
    if name is not None:
        return name
    if kind in _REFUSED:
        raise UsageError(f"{kind.__name__} cannot run on the servers: {_REFUSED[kind]}")
    return path_of(kind)


class StepSettings:
    """The settings of an optimizer that travel with every push. Schedules and loops may change any of them."""

    def __init__(self, optimizer: Optimizer) -> None:
        """The settings of now are those that the servers get with the optimizer's spec."""
        self._optimizer = optimizer
        self._known = [_options(optimizer, group) for group in optimizer.param_groups]
        self._is_decoupled = _decoupled(optimizer)
        self._seen: list[tuple[Any, ...]] = []
        self._changes: list[dict[str, Setting]] | None = None

    def rates(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def changes(self) -> list[dict[str, Setting]] | None:
        """Return the other settings of each group that differ from those that the servers know; None if none do."""
        names = [name for name in self._optimizer.defaults if name != "lr"]
        seen = [tuple(map(group.get, names)) for group in self._optimizer.param_groups]
        if seen != self._seen:
            self._changes = self._find_changes()
            self._seen = seen
        return self._changes

    def _find_changes(self) -> list[dict[str, Setting]] | None:
        if _decoupled(self._optimizer) != self._is_decoupled:
            raise UsageError("decoupled_weight_decay cannot change after the Trainer was created")
        groups = len(self._optimizer.param_groups)
        if groups != len(self._known):
            raise UsageError(
                f"the optimizer has {groups} parameter groups, but {len(self._known)} when the Trainer was created; "
                "close it (trainer.close()), and create another one after add_param_group"
            )
        changes = []
        for group, known in zip(self._optimizer.param_groups, self._known, strict=True):
            options = _options(self._optimizer, group)
            changes.append({name: value for name, value in options.items() if value != known[name] and name != "lr"})
        return changes if any(changes) else None


def spec_by_name(name: str, settings: Mapping[str, Any], style: str = "torch") -> OptimizerSpec:
    """Return the spec of an optimizer by name, with torch.optim's settings and defaults or, by `style`, MXNet's."""
    if not isinstance(name, str):
        raise _not_an_optimizer(name)
    if style not in ("torch", "mxnet"):
        raise unknown_name("style of optimizers", style, ("torch", "mxnet"))
    parameters = [torch.nn.Parameter(torch.zeros(1, 1, device="cpu"))]  # Muon takes matrices only
    if style == "mxnet":
        return spec_of(create(name, parameters, **settings), {})
    kind = import_class(name) if is_import_path(name) else _CLASSES.get(name.lower())
    if kind is None:
        refused = {kind.__name__.lower(): kind for kind in _REFUSED}
        if name.lower() in refused:
            _name_of(refused[name.lower()])
        raise unknown_name("optimizer", name, _CLASSES)
    try:
        optimizer = kind(parameters, **settings)
    except (TypeError, ValueError) as error:
        raise UsageError(f"optimizer {name!r}: {error}") from error
    return spec_of(optimizer, {})


def make_optimizer(spec: OptimizerSpec, parameter: torch.nn.Parameter) -> Optimizer:
    """Return the torch optimizer that a spec describes, for one key."""
    kind = import_class(spec.name) if is_import_path(spec.name) else _CLASSES[spec.name]
    return make_instance(kind, parameter, with_tuples(spec.groups[0]))


def _not_an_optimizer(given: object) -> UsageError:
    what = f"the class {given.__name__}" if isinstance(given, type) else repr(given)
    return UsageError(
        "set_optimizer takes an optimizer's name and settings ('sgd', lr=0.1), or an instance of one of torch.optim or "
        f"echelon.optim, not {what}"
    )


def _decoupled(optimizer: Optimizer) -> set[bool]:
    """Return the values of decoupled_weight_decay in the groups of an Adam or AdamW."""
    if not isinstance(optimizer, Adam):
        return set()
    return {bool(group.get("decoupled_weight_decay")) for group in optimizer.param_groups}


def _adam_or_adamw(optimizer: Optimizer) -> str:
    """Return adamw for torch's Adam with decoupled_weight_decay, which is the same optimizer."""
    decoupled = _decoupled(optimizer)
    if len(decoupled) > 1:
        raise UsageError("the servers run one optimizer: decoupled_weight_decay must be the same in all groups")
    return "adamw" if True in decoupled else "adam"


def _options(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, Setting]:
    """Return a parameter group's settings, without entries that users or schedules have added."""
    for name in _REJECTED:
        if group.get(name):
            raise UsageError(f"an optimizer with {name}=True cannot run on the servers")
    options: dict[str, Setting] = {}
    not_sent = _NOT_SENT | ({"decoupled_weight_decay"} if isinstance(optimizer, Adam) else set())
    for name in optimizer.defaults:
        if name not in not_sent and name in group:
            options[name] = _setting(optimizer, name, group[name])
    return options


def _setting(optimizer: Optimizer, name: str, value: Any) -> Setting:
    """Return a setting as it is sent. Only plain values are: the servers run the class, not this object."""
    values = [_plain(one) for one in value] if isinstance(value, tuple | list) else [_plain(value)]
    for one in values:
        if not isinstance(one, float | int | bool | str | None):
            raise UsageError(
                f"the setting {name} of {type(optimizer).__name__} is a {type(one).__name__}; servers take numbers, "
                f"booleans, texts, None and tuples of these. {ANYWHERE}"
            )
    return values if isinstance(value, tuple | list) else values[0]


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, torch.Tensor) and value.numel() == 1 else value
