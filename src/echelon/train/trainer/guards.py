"""Checks for calls and changes in the user's loop that would have the wrong effect or none.

Gradients that were pushed cannot be changed in this process any more. A change is an error, because the job would
continue with the old values. `optimizer.step()` in place of `trainer.step()`
would update this process alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from echelon.errors import UsageError


class WatchedGradients:
    """The gradients' memory as tensors with version counters of their own, which detect writes through them."""

    def __init__(self, places: Mapping[str, Tensor]) -> None:
        self._places = places
        supported = {name: place for name, place in places.items() if place.dtype != torch.bfloat16}  # by NumPy
        self._watched = {name: torch.from_numpy(place.numpy()) for name, place in supported.items()}
        self._versions = dict.fromkeys(self._watched, 0)

    @property
    def names(self) -> Iterable[str]:
        """The names of the gradients that can be watched."""
        return self._watched.keys()

    def __getitem__(self, name: str) -> Tensor:
        """Return the tensor that a parameter on the CPU gets as its `.grad`."""
        return self._watched.get(name, self._places[name])

    def ignore_writes_so_far(self) -> None:
        """Do not report earlier writes."""
        self._versions = {name: watched._version for name, watched in self._watched.items()}

    def was_written(self, name: str) -> bool:
        """Return whether there was a write since the last call."""
        version = self._watched[name]._version
        before, self._versions[name] = self._versions[name], version
        return version != before


class GuardedOptimizer:
    """An optimizer whose `step` only its Trainer may call. Of several Trainers of one optimizer, the last counts."""

    def __init__(self, optimizer: Optimizer) -> None:
        earlier = _STEP_HOOKS.get(optimizer)
        if earlier is not None:
            earlier.remove()
        self._optimizer = optimizer
        self._is_allowed = False
        self._hook = optimizer.register_step_pre_hook(self._check)
        _STEP_HOOKS[optimizer] = self._hook

    def step(self) -> None:
        """Run the optimizer."""
        self._is_allowed = True
        try:
            self._optimizer.step()
        finally:
            self._is_allowed = False

    def remove(self) -> None:
        """Let everybody call the optimizer's `step` again."""
        self._hook.remove()

    def _check(self, *_: object) -> None:
        if not self._is_allowed:
            raise UsageError(
                "optimizer.step() was called, but this optimizer belongs to a Trainer: call trainer.step(batch_size) "
                "instead, which also exchanges the gradients"
            )


_STEP_HOOKS: WeakKeyDictionary[Optimizer, RemovableHandle] = WeakKeyDictionary()
