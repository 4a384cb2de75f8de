"""Warnings about flags of MXNet that have no effect in a run.

Echelon's own flags are rejected in that case (`check`); MXNet's only cause a warning, so that its commands still run
unchanged. There is no warning about a script's defaults: `StoreAndRecord` records which flags were given.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)


class StoreAndRecord(argparse.Action):
    """Stores a value as usual, and records that the flag was given."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        setattr(namespace, self.dest, values)
        namespace.recorded = {*getattr(namespace, "recorded", ()), self.dest}


def warn(given: argparse.Namespace) -> None:
    """Log a warning for each flag that was given and has no effect."""
    for line in warnings_about(given):
        log.warning(line)


def warnings_about(given: argparse.Namespace) -> list[str]:
    """Return the lines that `warn` logs."""
    recorded = getattr(given, "recorded", ())
    reasons = {name: reason_for(given) for name, reason_for in _REASONS.items() if name in recorded}
    return [f"{_flag(given, name)} has no effect: {reason}" for name, reason in reasons.items() if reason]


def _flag(given: argparse.Namespace, name: str) -> str:
    value = getattr(given, name)
    return f"--{name.replace('_', '-')} {f'{value:g}' if isinstance(value, float) else value}"


def _steps(given: argparse.Namespace) -> str | None:
    kind, steps = given.lr_schedule, given.lr_step_epochs
    if not steps or (kind == "poly" and "pow" in steps):
        return None
    if kind != "step":
        return f"--lr-schedule {kind} has no steps"
    return None if given.lr_factor < 1 else f"--lr-factor {given.lr_factor:g} does not lower the learning rate"


def _macrobatch(given: argparse.Namespace) -> str | None:
    if not given.macrobatch_size:
        return None
    if given.optimizer.lower() != "lbsgd":
        return f"only --optimizer lbsgd uses it, not {given.optimizer}"
    return "--warmup-strategy lars scales by the norms of the weights" if given.warmup_strategy == "lars" else None


def _area(name: str) -> Callable[[argparse.Namespace], str | None]:
    def reason_for(given: argparse.Namespace) -> str | None:
        has_effect = getattr(given, name) == 1 or given.random_resized_crop
        return None if has_effect else "only --random-resized-crop 1 uses it"

    return reason_for


_REASONS: dict[str, Callable[[argparse.Namespace], str | None]] = {
    "lr_step_epochs": _steps,
    "macrobatch_size": _macrobatch,
    "min_random_area": _area("min_random_area"),
    "max_random_area": _area("max_random_area"),
    "gc_threshold": lambda given: "gradient compression is not implemented yet",
}
