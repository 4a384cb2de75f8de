"""An optimizer that belongs to a Trainer: its `step` is the Trainer's step, and its state is the store's.

A loop may therefore know nothing but its optimizer. Schedulers and GradScaler wrap and call `optimizer.step` as usual,
torch's step hooks run once per step, `optimizer.state_dict()` has the state that the servers hold, and
`optimizer.load_state_dict()` sends one to them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.errors import UsageError
from echelon.kvstore.state_files import SCALARS, by_key
from echelon.train.trainer.optimizer_state import state_of

Closure = Callable[[], Any]
EndStep = Callable[[Closure | None], Any]

_ATTACHED = "_echelon_attached"
_MARK = "_wrapped_by_lr_sched"  # of schedulers: they have wrapped this `step`
_UNSCALES = "_step_supports_amp_scaling"  # read by GradScaler: the optimizer divides by the loss scale itself


class AttachedOptimizer:
    """Replaces the `step` of one optimizer. Of several Trainers of one optimizer, the last counts.

    `end_step(closure)` is the Trainer's step, and returns what `optimizer.step` returns. With `updates_here` the
    Trainer runs the optimizer inside its step (`run`), and torch's step hooks run there. Otherwise they run around the
    Trainer's step. `needs_unscaled`: the Trainer reads the gradients before the optimizer runs, so GradScaler must
    divide them by the loss scale even if the optimizer could.
    """

    def __init__(
        self, optimizer: Optimizer, end_step: EndStep, *, updates_here: bool, needs_unscaled: bool = False
    ) -> None:
        earlier = getattr(optimizer, _ATTACHED, None)
        if earlier is not None:
            earlier.remove()
        self._optimizer = optimizer
        self._own: Any = optimizer.step  # the class's, or what a scheduler has put around it
        self._was_replaced = "step" in vars(optimizer)
        self._passes_through = False

        @torch.no_grad()
        def step(optimizer: Optimizer, closure: Closure | None = None) -> Any:
            if self._passes_through:
                return self._own(closure)
            optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers warn unless step() was called
            return end_step(closure)

        function: Any = step if updates_here else Optimizer.profile_hook_step(step)
        if hasattr(self._own, _MARK):
            setattr(function, _MARK, True)
        self._step = MethodType(function, optimizer)
        optimizer.step = self._step  # type: ignore[method-assign]
        setattr(optimizer, _ATTACHED, self)
        scaler_must_unscale = needs_unscaled or not updates_here
        self._unscales = scaler_must_unscale and bool(getattr(optimizer, _UNSCALES, False))
        if self._unscales:  # a fused optimizer
            setattr(optimizer, _UNSCALES, False)

    def run(self, closure: Closure | None = None) -> Any:
        """Run the optimizer in this process."""
        self._passes_through = True
        try:
            return self._own(closure) if closure is not None else self._own()
        finally:
            self._passes_through = False

    def remove(self) -> None:
        """Give the optimizer its own `step` back. A scheduler may have wrapped the replacement, which stays usable."""
        self._passes_through = True
        optimizer = self._optimizer
        if getattr(optimizer, _ATTACHED, None) is not self:
            return
        delattr(optimizer, _ATTACHED)
        if self._unscales:
            setattr(optimizer, _UNSCALES, True)
        if vars(optimizer).get("step") is self._step:
            if self._was_replaced:
                optimizer.step = self._own  # type: ignore[method-assign]
            else:
                del optimizer.step


class StateHolder(Protocol):
    """Where the state of an optimizer is, by `<parameter>/<state>`."""

    def optimizer_state(self) -> dict[str, Tensor]: ...

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None: ...


class StateInStore:
    """Makes an optimizer's `state_dict` and `load_state_dict` work on the state in a store.

    The optimizer's own `state` is empty. Reading an entry of it is an error that says what to call instead.
    """

    def __init__(self, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], holder: StateHolder) -> None:
        self._optimizer = optimizer
        self._parameters = parameters
        self._holder = holder
        self._hooks = [
            optimizer.register_state_dict_post_hook(self._fill),
            optimizer.register_load_state_dict_post_hook(self._send),
        ]
        optimizer.state = _Elsewhere()

    def remove(self) -> None:
        """Let the optimizer save and load its own state again."""
        for hook in self._hooks:
            hook.remove()
        self._optimizer.state = defaultdict(dict, self._optimizer.state)

    def bring_home(self) -> None:
        """Give the optimizer the state in the store, as its own."""
        for name, kinds in self._fetch().items():
            self._optimizer.state[self._parameters[name]] = kinds

    def _fetch(self) -> dict[str, dict[str, Tensor]]:
        found: dict[str, dict[str, Tensor]] = {}
        for name, kinds in by_key(self._holder.optimizer_state()).items():
            if name in self._parameters:  # the store may have other keys, too
                device = self._parameters[name].device
                found[name] = {kind: one if kind in SCALARS else one.to(device) for kind, one in kinds.items()}
        return found

    def _fill(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        numbers = {id(parameter): number for number, parameter in enumerate(ordered)}
        found = {numbers[id(self._parameters[name])]: kinds for name, kinds in self._fetch().items()}
        state_dict["state"] = dict(sorted(found.items()))

    def _send(self, optimizer: Optimizer) -> None:
        self._holder.load_optimizer_state(state_of(optimizer, self._parameters))
        optimizer.state = _Elsewhere()


class _Elsewhere(defaultdict[Tensor, Any]):
    """The `state` of an optimizer that does not run in this process."""

    def __missing__(self, key: Tensor) -> Any:
        raise UsageError(
            "optimizer.state is empty because the servers hold the optimizer's state; optimizer.state_dict()['state'] "
            "has it, by the number of the parameter"
        )
