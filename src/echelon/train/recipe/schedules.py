"""Learning rates as a pure function of the update: MXNet's steps, poly and cosine, and warm-up for any optimizer.

An update is one step of one worker. Updates count from 1 over the whole training, also after it is resumed (MXNet
starts at 1 again and shifts its steps; the rates are the same). Nothing here has state, so two workers, or a run and
its continuation, agree without communication. The rate equals MXNet's at every update: the first update with a lower
rate is the one after `epoch_size * step`, and the last update of poly has rate 0.

Warm-up goes from `warmup_begin_lr` to `lr`, and decay starts after it. lbsgd does its own (`echelon.optim.LBSGD`).
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

from echelon.errors import UsageError

KINDS = ("step", "poly", "cosine", "constant")
WARMUPS: dict[str, Callable[[float], float]] = {  # from 0 to 1, as a function of the completed fraction
    "linear": lambda done: done,
    "constant": lambda done: 0.0,
    "power2": lambda done: done * done,
    "sqrt": math.sqrt,
}
_POWER = 2.0  # of poly, unless "pow" gives another


@dataclass(frozen=True, slots=True)
class Steps:
    """Multiplies the rate by `factor` after each of `updates`; without any, the rate is constant."""

    factor: float = 1.0
    updates: tuple[float, ...] = ()

    def passed(self, update: float) -> int:
        return bisect_left(self.updates, update)

    def rate(self, lr: float, passed: int) -> float:
        for _ in range(passed):  # repeated multiplication, as in MXNet: a power would round differently
            lr *= self.factor
        return lr


@dataclass(frozen=True, slots=True)
class Curve:
    """Goes from the full rate at update `begin` to `final_lr` at `end`, and stays there; `shape` goes from 1 to 0."""

    begin: float
    end: float
    final_lr: float
    shape: Callable[[float], float]

    def rate(self, lr: float, update: int) -> float:
        if update >= self.end:
            return self.final_lr
        return self.final_lr + (lr - self.final_lr) * self.shape((update - self.begin) / (self.end - self.begin))


@dataclass(frozen=True, slots=True)
class Warmup:
    """Raises the rate over the first `updates`; `shape` goes from 0 to 1."""

    updates: float
    begin_lr: float
    shape: Callable[[float], float]

    def replaces(self, update: float) -> bool:
        """Return whether the warm-up alone determines the rate of this update."""
        return update < self.updates

    def rate(self, lr: float, update: int) -> float:
        return self.begin_lr + (lr - self.begin_lr) * self.shape(update / self.updates)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The rate of every update, and MXNet's log lines about its changes. Use `make_schedule`."""

    lr: float
    epoch_size: int
    begin_epoch: float
    warmup: Warmup
    steps: Steps
    curve: Curve | None = None

    def rate(self, update: int) -> float:
        """Return the learning rate of an update; the first update is 1."""
        if self.warmup.replaces(update):
            return self.warmup.rate(self.lr, update)
        if self.curve is not None:
            return self.curve.rate(self.lr, update)
        return self.steps.rate(self.lr, self._passed(update))

    def changes(self, update: int) -> str | None:
        """Return MXNet's line if this is the first update after a step. `adjustment` covers steps before the start."""
        covered = bisect_right(self.steps.updates, self.begin_epoch * self.epoch_size)
        if self._passed(update) <= max(self._passed(update - 1), covered):
            return None
        return f"Update[{update}]: Change learning rate to {self.rate(update):0.5e}"

    def adjustment(self, begin_epoch: float | None = None) -> str | None:
        """Return MXNet's line if training starts after at least one step; at `self.begin_epoch` by default."""
        epoch = self.begin_epoch if begin_epoch is None else begin_epoch
        passed = bisect_right(self.steps.updates, epoch * self.epoch_size)
        if not passed or self.warmup.replaces(epoch * self.epoch_size + 1):
            return None
        rate = self.steps.rate(self.lr, passed)
        return f"Adjust learning rate to {rate:e} for epoch {int(epoch)}"

    def _passed(self, update: int) -> int:
        return 0 if self.warmup.replaces(update) else self.steps.passed(update)


def make_schedule(
    *,
    lr: float,
    factor: float,
    step_epochs: str,
    kind: str = "step",
    epoch_size: int,
    num_epochs: int,
    begin_epoch: float = 0,
    warmup_epochs: float = 0,
    warmup_strategy: str = "linear",
    warmup_begin_lr: float = 0.0,
    final_lr: float = 0.0,
) -> Schedule:
    """Make the schedule that the flags describe; `epoch_size` is in updates of one worker.

    `kind` step: multiply by `factor` at each of `step_epochs` ("30,60"; fractions of an epoch are allowed), or poly if
    that is "pow2"; constant if the factor is 1 or more, or if there are no steps. poly, cosine: from `lr` to `final_lr`
    over all epochs.
    """
    _check_name("--lr-schedule", kind, KINDS)
    _check_name("--warmup-strategy", warmup_strategy, WARMUPS)
    for what, value in (("--lr", lr), ("--lr-factor", factor), ("--warmup-epochs", warmup_epochs)):
        _check_least(what, value, 0)
    _check_least("updates per epoch:", epoch_size, 1)
    warmup = Warmup(warmup_epochs * epoch_size, warmup_begin_lr, WARMUPS[warmup_strategy])
    steps, shape = Steps(), _shape(kind, factor, step_epochs)
    if kind == "step" and shape is None and factor < 1:
        steps = Steps(factor, tuple(epoch_size * epoch for epoch in _epochs(step_epochs)))
    curve = None
    if shape is not None:
        curve = Curve(warmup.updates, num_epochs * epoch_size, final_lr, shape)
    return Schedule(lr, epoch_size, begin_epoch, warmup, steps, curve)


def _shape(kind: str, factor: float, step_epochs: str) -> Callable[[float], float] | None:
    """Return the curve from 1 to 0, or None if the schedule is not a curve."""
    if kind == "cosine":
        return lambda done: (1 + math.cos(math.pi * done)) / 2
    power = _power(step_epochs)
    if kind == "poly" or (kind == "step" and power is not None and factor < 1):
        exponent = _POWER if power is None else power
        return lambda done: float((1 - done) ** exponent)
    return None


def _power(step_epochs: str) -> float | None:
    """Return the 2 of pow2, pow-2 and "pow 2"; None for a list of epochs."""
    if "pow" not in step_epochs:
        return None
    found = re.fullmatch(r"\s*pow[- ]*(\d+\.?\d*|\.\d+)\s*", step_epochs)
    if found is None or not float(found[1]):
        raise UsageError(f"--lr-step-epochs {step_epochs!r}: write a power like pow2, with a number above 0")
    return float(found[1])


def _epochs(step_epochs: str) -> list[float]:
    if not step_epochs.strip():
        return []
    try:
        epochs = [float(part) for part in step_epochs.split(",")]
    except ValueError:
        raise UsageError(
            f"--lr-step-epochs {step_epochs!r} is neither a list such as 30,60 nor a power such as pow2"
        ) from None
    if not (epochs[0] >= 0 and all(one < other for one, other in pairwise(epochs))):
        raise UsageError(f"--lr-step-epochs {step_epochs!r}: give epochs of 0 or more, in increasing order")
    return epochs


def _check_name(what: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        raise UsageError(f"{what} {name!r}: use one of {', '.join(known)}")


def _check_least(what: str, value: float, least: float) -> None:
    if not (math.isfinite(value) and value >= least):
        raise UsageError(f"{what} {value:g}: give a number of {least:g} or more")
