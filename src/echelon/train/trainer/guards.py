"""Seeing what a user's loop changed behind a trainer's back: gradients in the store's memory, and settings.

What has left for the servers, and what they took over when training began, cannot be changed here any more. Doing so
must be an error: the job would train on with the old values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from echelon.errors import UsageError

_FIXED = ("momentum", "betas", "weight_decay", "alpha", "eps", "dampening", "nesterov", "lr_decay")


class WatchedGradients:
    """The places of gradients as tensors with version counters of their own, which tell of writes through them."""

    def __init__(self, places: Mapping[str, Tensor]) -> None:
        self._places = places
        plain = {name: place for name, place in places.items() if place.dtype != torch.bfloat16}  # NumPy has none
        self._watched = {name: torch.from_numpy(place.numpy()) for name, place in plain.items()}
        self._versions = dict.fromkeys(self._watched, 0)

    @property
    def names(self) -> Iterable[str]:
        """Those that can be watched."""
        return self._watched.keys()

    def __getitem__(self, name: str) -> Tensor:
        """What a parameter on the CPU gets as its `.grad`."""
        return self._watched.get(name, self._places[name])

    def forgive(self) -> None:
        """What was written so far does not count."""
        self._versions = {name: watched._version for name, watched in self._watched.items()}

    def was_written(self, name: str) -> bool:
        """Whether somebody wrote since this was last asked."""
        version = self._watched[name]._version
        before, self._versions[name] = self._versions[name], version
        return version != before


class FixedSettings:
    """An optimizer's settings that the servers took over once."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._settings = [{name: group[name] for name in _FIXED if name in group} for group in optimizer.param_groups]

    def check(self) -> None:
        """UsageError if one of them is another now."""
        for group, settings in zip(self._optimizer.param_groups, self._settings, strict=True):
            for name, before in settings.items():
                if group[name] != before:
                    raise UsageError(
                        f"the optimizer's {name} went from {before} to {group[name]}; only the learning rate can "
                        "change during training (OneCycleLR: pass cycle_momentum=False)"
                    )
