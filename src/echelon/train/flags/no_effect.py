"""Flags that can do nothing in a run. Ours are refused; MXNet's have a warning, because its commands run as written.

A script has defaults of its own, which nobody asked for on the command line: `Noted` tells them from what was given.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from typing import Any

from echelon.data.images.config import AugmentConfig
from echelon.errors import UsageError
from echelon.train.recipe.options import TrainOptions

log = logging.getLogger(__name__)


class Noted(argparse.Action):
    """Stores a value as usual, and notes that the flag was given."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        setattr(namespace, self.dest, values)
        namespace.noted = {*getattr(namespace, "noted", ()), self.dest}


def warn(given: argparse.Namespace) -> None:
    """Log a line for each flag that was given and has no effect."""
    for line in lines_about(given):
        log.warning(line)


def lines_about(given: argparse.Namespace) -> list[str]:
    """What `warn` logs."""
    noted = getattr(given, "noted", ())
    reasons = {name: why(given) for name, why in _REASONS.items() if name in noted}
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
    return None if given.lr_factor < 1 else f"--lr-factor {given.lr_factor:g} leaves the rate as it is"


def _macrobatch(given: argparse.Namespace) -> str | None:
    if not given.macrobatch_size:
        return None
    if given.optimizer.lower() != "lbsgd":
        return f"only --optimizer lbsgd warms up to it, not {given.optimizer}"
    return "--warmup-strategy lars goes by the norms of the weights" if given.warmup_strategy == "lars" else None


def _area(name: str) -> Callable[[argparse.Namespace], str | None]:
    def why(given: argparse.Namespace) -> str | None:
        as_said = getattr(given, name) == 1 or given.random_resized_crop
        return None if as_said else "only --random-resized-crop 1 draws areas"

    return why


_REASONS: dict[str, Callable[[argparse.Namespace], str | None]] = {
    "lr_step_epochs": _steps,
    "macrobatch_size": _macrobatch,
    "min_random_area": _area("min_random_area"),
    "max_random_area": _area("max_random_area"),
    "gc_threshold": lambda given: "gradients are not compressed yet",
}


def check_alone(options: TrainOptions) -> None:
    """Refuse what would do nothing by itself."""
    pace = options.pace
    if (pace.slow or pace.stall) and not pace.seconds:
        raise UsageError("--slow and --stall multiply the seconds of --pace: give that, too, for example --pace 0.05")
    if options.save_batches and not options.model_prefix:
        raise UsageError(f"--save-batches {options.save_batches} has nowhere to save: give --model-prefix, too")
    if (options.resume or options.load_epoch is not None) and not options.model_prefix:
        raise UsageError("to go on from a checkpoint, name its prefix: --model-prefix PREFIX")
    if options.data_sharding != TrainOptions().data_sharding and not options.data_allocator:
        raise UsageError(f"--data-sharding {options.data_sharding} is not read without --data-allocator 1: give both")
    if options.resume and options.load_epoch is not None:
        raise UsageError(
            f"--load-epoch {options.load_epoch} and --resume auto both say where to go on: give one of them"
        )


def check_validation(options: TrainOptions, *, has_validation: bool) -> None:
    """Refuse what waits for a validation that cannot come; the data has to be open to know."""
    given = []
    if options.target_accuracy is not None:
        given.append(f"--target-accuracy {options.target_accuracy:g}")
    if options.eval_every:
        given.append(f"--eval-every {options.eval_every}")
    if has_validation or not given:
        return
    look, them = ("look", "them") if len(given) > 1 else ("looks", "it")
    where = "--benchmark 1 has none:" if options.benchmark else f"{options.data} has none here: give --data-val, or"
    raise UsageError(f"{' and '.join(given)} {look} at validation data, and {where} leave {them} out")


def warn_of_crop(augment: AugmentConfig) -> None:
    """Say of a crop at random that it has nothing to choose; the data set's own settings have to be known."""
    if augment.random_resized_crop and not augment.resizes_at_random:
        log.warning(
            "--random-resized-crop 1 crops the middle, as in MXNet, where areas and aspect ratios are 1: give "
            "--min-random-area 0.08, for example, or --max-random-aspect-ratio"
        )
