"""Kernels that run an optimizer class by its own `step`, one tensor at a time.

`ElementwiseClass` runs a class of torch.optim that updates every element by itself, on any piece of a key. Its states
of the key's shape are in the server's storage; its numbers (the step, NAdam's mu_product, ASGD's eta and mu) are part
of the `Progress`, because all pieces have the same. `WholeClass` runs any class on whole keys, with whatever state it
keeps for a parameter.

A class sees one parameter at a time. One that combines parameters, or that changes its own settings or attributes in
`step`, would compute something else than in one process; the second kind is recognised and refused.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from copy import copy
from inspect import Parameter, signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.errors import JobError, UsageError
from echelon.optim.import_path import ANYWHERE
from echelon.server.optimizer.kernel import Kernel, Options, Progress, States, Step

State = dict[str, Any]  # of one parameter, as torch.optim's classes keep it


class _ClassKernel(Kernel):
    def __init__(self, options: Options, runner: Runner) -> None:
        super().__init__(options)
        self._runner = runner

    def with_options(self, options: Options) -> Kernel:
        other = copy(self)
        other.options, other._runner = options, self._runner.with_options(options)
        return other


class ElementwiseClass(_ClassKernel):
    """A class of torch.optim that updates every element by itself."""

    def __init__(self, kind: type[Optimizer], options: Options) -> None:
        super().__init__(options, Runner(kind, options))
        self._form = _form_of(kind)
        self._divides_change = kind is torch.optim.Rprop  # its lr is only the first size of steps

    @property
    def state_names(self) -> tuple[str, ...]:
        return self._form.tensors

    @property
    def scalar_names(self) -> tuple[str, ...]:
        return tuple(self._form.scalars)

    def progress(self, before: Progress, lr: float) -> Progress:
        """Return the progress after an update, with the numbers that the class computes for an empty tensor."""
        after = super().progress(before, lr)
        if self.scalar_names == ("step",):
            return after
        state = self._state([torch.empty(0)] * len(self.state_names), before)
        self._runner.run(torch.empty(0), torch.empty(0), state, lr)
        numbers = tuple((name, float(state[name])) for name in self.scalar_names if name != "step")
        return after._replace(numbers=numbers)

    def update(self, weights: Tensor, gradient: Tensor, states: States, step: Step) -> None:
        divisor = step.divisor
        start = weights.clone() if self._divides_change and divisor != 1 else None
        state = self._state(states, step.before)
        if "eta" in state:  # ASGD computed it from the rate in the step before
            state["eta"] /= divisor
        self._runner.run(weights, gradient, state, step.lr if self._divides_change else step.lr / divisor)
        for name, stored in zip(self.state_names, states, strict=True):
            if state[name].data_ptr() != stored.data_ptr():  # the class created it in its first step
                stored.copy_(state[name])
        if start is not None:
            divide_change(weights, start, divisor)

    def _state(self, states: States, before: Progress) -> State:
        """Return the state of a piece as the class keeps it; an empty one before the first step."""
        if not before.step:
            return {}
        numbers = {"step": float(before.step), **dict(before.numbers)}
        scalars = {name: torch.tensor(numbers[name], dtype=dtype) for name, dtype in self._form.scalars.items()}
        return {**scalars, **dict(zip(self.state_names, states, strict=True))}


class WholeClass(_ClassKernel):
    """Any class of optimizers, on whole keys."""

    whole = True

    def __init__(self, kind: type[Optimizer], options: Options) -> None:
        super().__init__(options, Runner(kind, options, is_guarded=True))

    @property
    def state_names(self) -> tuple[str, ...]:
        return ()

    def update_object(self, weights: Tensor, gradient: Tensor, state: State, step: Step) -> None:
        """Update a key and its state in place. The gradient may be changed. A divided step moves the weights less."""
        start = weights.clone() if step.divisor != 1 else None
        self._runner.run(weights, gradient, state, step.lr)
        if start is not None:
            divide_change(weights, start, step.divisor)


class Runner:
    """An instance of an optimizer class, whose `step` is called for one tensor at a time."""

    def __init__(self, kind: type[Optimizer], options: Options, *, is_guarded: bool = False) -> None:
        """`is_guarded`: the class is not known to leave its settings and attributes unchanged."""
        self._options = with_tuples(options)
        self._optimizer = make_instance(kind, nn.Parameter(torch.zeros(1, 1)), self._options)
        self._is_guarded = is_guarded

    def with_options(self, options: Options) -> Runner:
        """Return a runner of the same instance with other settings, which are not checked, as in torch.optim."""
        other = copy(self)
        other._options = with_tuples(options)
        return other

    def run(self, weights: Tensor, gradient: Tensor, state: State, lr: float) -> None:
        """Make a step: change the weights and the state in place."""
        optimizer = self._optimizer
        (group,) = optimizer.param_groups
        parameter = nn.Parameter(weights)
        parameter.grad = gradient
        group.update(self._options, params=[parameter])
        if "lr" in self._options:
            group["lr"] = lr
        if state:
            optimizer.state[parameter] = state
        before = self._remembered() if self._is_guarded else {}
        try:
            optimizer.step()
        except Exception as error:
            if not self._is_guarded:
                raise
            traceback.print_exc()
            raise JobError(
                f"{_name(optimizer)}.step() failed on a parameter of shape {tuple(weights.shape)}: {error!r}"
            ) from error
        found = optimizer.state.pop(parameter, {})
        if found is not state:
            state.clear()
            state.update(found)
        if parameter.data_ptr() != weights.data_ptr():  # the class gave the parameter other memory
            weights.copy_(parameter.detach())
        if self._is_guarded:
            self._check_unchanged(before)

    def _remembered(self) -> dict[str, Any]:
        """Return the settings and the plain attributes of the instance."""
        (group,) = self._optimizer.param_groups
        attributes = {
            f"self.{name}": v for name, v in vars(self._optimizer).items() if isinstance(v, int | float | str)
        }
        return {**{f"group[{name!r}]": v for name, v in group.items() if name != "params"}, **attributes}

    def _check_unchanged(self, before: Mapping[str, Any]) -> None:
        after = self._remembered()
        changed = [name for name in {**before, **after} if before.get(name, self) != after.get(name, self)]
        if changed:
            raise JobError(
                f"{_name(self._optimizer)} changes {', '.join(changed)} in step(). Servers call step() for one "
                f"parameter at a time, so it can change only the state of a parameter. {ANYWHERE}"
            )


def with_tuples(options: Options) -> dict[str, Any]:
    """Return settings as an optimizer has them; messages have lists in place of tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}


def divide_change(weights: Tensor, start: Tensor, divisor: float) -> None:
    """Divide what an update has changed."""
    weights.sub_(start).div_(divisor).add_(start)


class _Form(NamedTuple):
    """The states of an element-wise class: those of the parameter's shape, and numbers."""

    tensors: tuple[str, ...]
    scalars: dict[str, torch.dtype]


_FORMS: dict[type[Optimizer], _Form] = {}


def _form_of(kind: type[Optimizer]) -> _Form:
    """Return the states that a class of torch.optim keeps. Its settings do not change them."""
    if kind not in _FORMS:
        _FORMS[kind] = _find_form(kind)
    return _FORMS[kind]


def _find_form(kind: type[Optimizer]) -> _Form:
    state: State = {}
    Runner(kind, {"lr": 0.5}).run(torch.ones(2), torch.ones(2), state, 0.5)
    tensors = tuple(name for name, value in state.items() if value.ndim)
    scalars = {name: value.dtype for name, value in state.items() if not value.ndim}
    return _Form(tensors, scalars)


def make_instance(kind: type[Optimizer], parameter: nn.Parameter, options: Options) -> Optimizer:
    """Make an optimizer for one parameter. Settings that the constructor does not accept are set afterwards."""
    accepted = signature(kind).parameters
    takes_any = any(one.kind is Parameter.VAR_KEYWORD for one in accepted.values())
    passed = {name: value for name, value in options.items() if takes_any or name in accepted}
    make: Any = kind
    try:
        optimizer: Optimizer = make([parameter], **passed)
    except Exception as error:
        raise UsageError(f"{kind.__name__} cannot be made from its settings {dict(options)}: {error!r}") from error
    optimizer.param_groups[0].update(options)
    return optimizer


def _name(optimizer: Optimizer) -> str:
    return type(optimizer).__name__
