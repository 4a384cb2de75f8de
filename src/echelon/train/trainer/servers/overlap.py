"""Whether gradients are sent during backward, and what the loop must then leave alone until `step`.

Sending during backward hides the network's time, but what was sent cannot be changed. Some loops change gradients,
settings or weights between `backward()` and `step()`, or run backward several times. Unless the caller has decided, the
first step sends nothing early and shows what the loop does; the later ones then send early or not. After that, such a
change is an error.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

log = logging.getLogger(__name__)

Settings = list[dict[str, Any]]


class Overlap:
    """The decision. `wanted` None: it is open until the first step has ended."""

    def __init__(self, wanted: bool | None) -> None:
        self._wanted = wanted
        self._reason = ""

    @property
    def is_on(self) -> bool:
        """Whether gradients are sent during backward."""
        return self._wanted is True

    @property
    def is_open(self) -> bool:
        """Whether the decision is open."""
        return self._wanted is None

    def rule_out(self, reason: str) -> None:
        """Note that the loop does something that requires gradients to be sent in `step`."""
        if self.is_open and not self._reason:
            self._reason = reason

    def decide(self) -> None:
        """Decide at the end of a step, if the decision is open."""
        if self.is_open:
            self._wanted = not self._reason
            if self._reason:
                log.info("gradients are sent in step(), not during backward, because the loop %s", self._reason)


def settings_of(optimizer: Optimizer) -> Settings:
    """Return a copy of the optimizer's settings, to compare with later."""
    return [
        {
            name: float(value) if isinstance(value, Tensor) else value  # a tensor could be changed in place
            for name, value in group.items()
            if name not in ("params", "param_names")
        }
        for group in optimizer.param_groups
    ]


def changed_setting(before: Settings, after: Settings) -> str | None:
    """Return what changed, as `lr from 0.1 to 0.2`, or None."""
    for old, new in zip(before, after, strict=False):
        for name, value in new.items():
            if name in old and not _same(old[name], value):
                return f"{name} from {old[name]} to {value}"
    return None


def _same(one: Any, other: Any) -> bool:
    return bool(one is other or one == other)
