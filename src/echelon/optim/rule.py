"""The base classes of MXNet's optimizers: an update rule each, and the torch optimizer around it.

A rule updates tensors in place from their gradients, their states, the number of their updates and the settings. The
torch optimizer applies the rule to whole parameters, and servers apply it to their pieces of them: the same operations
on the same elements, so the same bits. A rule with `whole` set needs a whole parameter at once and rejects pieces: for
its norm (LARS, LAMB), for its rows (GroupAdaGrad), or for noise (SGLD).

The formulas and defaults are those of MXNet, for gradients that are already divided by the batch size. They use basic
torch operations, which give an element the same bits however a tensor is divided.

A `Rule` updates one tensor at a time. A `ForeachRule` updates lists of tensors with torch's multi-tensor operations. It
accepts a learning rate and a count on the device, so that a CUDA graph can record its step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypedDict

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

Options = Mapping[str, Any]
States = Sequence[Tensor]
Tensors = list[Tensor] | tuple[Tensor, ...]
Number = float | Tensor  # on the host, or on the device inside a captured step


class Common(TypedDict, total=False):
    """The settings of every rule: the gradient is multiplied by `rescale_grad`, then limited to ±`clip_gradient`."""

    rescale_grad: float
    clip_gradient: float | None


class Moment(NamedTuple):
    """When an update happens: its number, counted from 1, and its learning rate; and whether gradients overflowed."""

    step: Number
    lr: Number
    found_inf: Tensor | None = None

    @property
    def exact_step(self) -> Number:
        """The number in float64, in which powers of a number just below 1 are exact enough."""
        return self.step.double() if isinstance(self.step, Tensor) else self.step


class Rule(Optimizer):
    """A torch optimizer with one update rule. Its states are those of `state_names` and, if it `counts`, `step`."""

    states: ClassVar[tuple[str, ...]] = ()  # besides momentum
    whole: ClassVar[bool] = False
    counts: ClassVar[bool] = True  # whether `update` uses the number of updates
    divides_gradient: ClassVar[bool] = False  # by the servers' divisor of a step, instead of the learning rate
    ignores_rate: ClassVar[bool] = False  # MXNet's formula has no learning rate
    clips_decayed: ClassVar[bool] = False  # weight decay is added to the gradient before it is clipped
    capturable: ClassVar[bool] = False  # whether a CUDA graph can record a step
    skips_overflow: ClassVar[bool] = False  # whether a captured step skips itself if `found_inf` is set

    def __init__(self, params: ParamsT, **settings: Any) -> None:
        """Raises ValueError for invalid settings, as torch.optim does."""
        settings = {"rescale_grad": 1.0, "clip_gradient": None, **settings}
        for name in ("lr", "momentum", "weight_decay", "eps"):
            if not settings.get(name, 0) >= 0:
                raise ValueError(f"Invalid {name}: {settings[name]}")
        limit = settings["clip_gradient"]
        if limit is not None and not limit > 0:
            raise ValueError(f"Invalid clip_gradient: {limit}; None means no limit")
        super().__init__(params, settings)

    @classmethod
    def state_names(cls, options: Options) -> list[str]:
        """Return the names of a parameter's states, in the order in which `update` gets them. They begin as zeros."""
        return ["momentum_buffer", *cls.states] if options.get("momentum") else [*cls.states]

    @classmethod
    def update(cls, weights: Tensor, gradient: Tensor, states: States, step: int, lr: float, options: Options) -> None:
        """Update weights and states in place. The gradient must not be changed; `step` counts from 1."""
        raise NotImplementedError

    @classmethod
    def apply(cls, weights: Tensor, gradient: Tensor, states: States, step: int, lr: float, options: Options) -> None:
        """Prepare the gradient and update. Workers and servers call this."""
        (prepared,) = cls.prepared([gradient], [weights], options)
        cls.update(weights, prepared, states, step, lr, options)

    @classmethod
    def prepared(cls, gradients: Tensors, weights: Tensors, options: Options) -> Tensors:
        """Return the rescaled and clipped gradients; with `clips_decayed`, weight decay is added in between."""
        found: Tensors = gradients
        if (factor := options.get("rescale_grad", 1.0)) != 1:
            found = torch._foreach_mul(found, factor)
        if cls.clips_decayed and (decay := options["weight_decay"]):
            found = torch._foreach_add(found, weights, alpha=decay)
        if (limit := options.get("clip_gradient")) is not None:
            found = torch._foreach_clamp_min(torch._foreach_clamp_max(found, limit), -limit)
        return found

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        numbers = itertools.count()
        for group in self.param_groups:
            numbered = zip(numbers, group["params"], strict=False)
            self._update_group([(number, p) for number, p in numbered if p.grad is not None], group)
        return loss

    def _update_group(self, numbered: Iterable[tuple[int, Tensor]], group: Options) -> None:
        """Update parameters that have gradients, each with its number among all parameters."""
        for number, parameter in numbered:
            self._update_one(number, parameter, group)

    def _update_one(self, number: int, parameter: Tensor, group: Options) -> None:
        states = self._states(parameter, group)
        step = self._count(self.state[parameter]) if states and self.counts else 1
        assert parameter.grad is not None
        self.apply(parameter, parameter.grad, states, step, self._rate(group), group)

    @classmethod
    def _rate(cls, group: Options) -> float:
        return 1.0 if cls.ignores_rate else float(group["lr"])

    def _states(self, parameter: Tensor, group: Options) -> list[Tensor]:
        """Return a parameter's states, which are created at first use."""
        names = self.state_names(group)
        state = self.state[parameter] if names else {}
        for name in names:
            if name not in state:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return [state[name] for name in names]

    @staticmethod
    def _count(state: dict[str, Any]) -> int:
        """Count an update and return the number of updates. The count is on the CPU, as in torch.optim."""
        state["step"] = state.get("step", torch.tensor(0.0)) + 1
        return int(state["step"])


class ForeachRule(Rule):
    """A rule for lists of tensors, one kernel for many of them on a GPU. Most of these can be captured."""

    capturable = True

    def __init__(self, params: ParamsT, **settings: Any) -> None:
        super().__init__(params, **settings)
        self._shared: list[Tensor] = []  # counts on the device

    @classmethod
    def update_all(
        cls, weights: Tensors, gradients: Tensors, states: Sequence[Tensors], at: Moment, options: Options
    ) -> None:
        """Update lists of weights and states in place. `states` has one list for each name of `state_names`.

        Gradients must not be changed.
        """
        raise NotImplementedError

    @classmethod
    def update(cls, weights: Tensor, gradient: Tensor, states: States, step: int, lr: float, options: Options) -> None:
        cls.update_all([weights], [gradient], [[state] for state in states], Moment(step, lr), options)

    def _update_group(self, numbered: Iterable[tuple[int, Tensor]], group: Options) -> None:
        parameters = [parameter for _, parameter in numbered]
        on_device = isinstance(group["lr"], Tensor)
        lr = group["lr"] if on_device and not self.ignores_rate else self._rate(group)
        found_inf = getattr(self, "found_inf", None) if on_device else None
        states = {parameter: self._states(parameter, group) for parameter in parameters}
        counted = self._count_on_device if on_device else self._count_on_host
        for step, members in counted(parameters, found_inf) if self.counts else [(1, parameters)]:
            if members:
                prepared = self.prepared([p.grad for p in members if p.grad is not None], members, group)
                lists = list(zip(*(states[parameter] for parameter in members), strict=True))
                self.update_all(members, prepared, lists, Moment(step, lr, found_inf), group)

    def _count_on_host(self, parameters: Tensors, _: Tensor | None) -> list[tuple[Number, list[Tensor]]]:
        """Count an update of the parameters and return them by their numbers of updates, which are usually equal."""
        found: dict[int, list[Tensor]] = {}
        for parameter in parameters:
            found.setdefault(self._count(self.state[parameter]), []).append(parameter)
        return list(found.items())

    def _count_on_device(self, parameters: Tensors, found_inf: Tensor | None) -> list[tuple[Number, list[Tensor]]]:
        """Count as `_count_on_host` does, without the host: parameters with equal counts share one tensor."""
        counts = self._shared_counts(parameters)
        if counts is None:
            self._share_counts(parameters)
            counts = self._shared_counts(parameters) or []
        for count in counts:
            count.add_(1 if found_inf is None else 1 - found_inf)
        return [(count, [p for p in parameters if self.state[p]["step"] is count]) for count in counts]

    def _shared_counts(self, parameters: Tensors) -> list[Tensor] | None:
        """Return the different counts of the parameters, or None if some are not shared: at first, or just loaded."""
        counts = {id(count): count for count in (self.state[p].get("step") for p in parameters)}
        if not all(any(count is known for known in self._shared) for count in counts.values()):
            return None
        return list(counts.values())

    def _share_counts(self, parameters: Tensors) -> None:
        """Move counts to the device, one tensor for each number. This waits for the device, so not while capturing."""
        shared: dict[float, Tensor] = {}
        for parameter in parameters:
            number = float(self.state[parameter].get("step", 0.0))
            if number not in shared:
                shared[number] = torch.tensor(number, device=parameter.device)
            self.state[parameter]["step"] = shared[number]
        self._shared = [*self._shared, *shared.values()]


def scaled(tensors: Tensors, factor: Number) -> Tensors:
    """Return the tensors multiplied by a factor, which may be on the device."""
    return torch._foreach_mul(tensors, factor.to(tensors[0].dtype) if isinstance(factor, Tensor) else factor)


def subtract(targets: Tensors, changes: Tensors, factor: Number) -> None:
    """Subtract `factor` times the changes. A factor on the device cannot be an argument of one kernel."""
    if isinstance(factor, Tensor):
        torch._foreach_sub_(targets, scaled(changes, factor))
    else:
        torch._foreach_add_(targets, changes, alpha=-factor)
