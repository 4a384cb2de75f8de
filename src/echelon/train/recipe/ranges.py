"""The valid numbers of each training flag, in one table. NaN is never valid.

`AugmentConfig` has the ranges of the augmentation flags; switches such as `--benchmark 1` accept any whole number.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from echelon.errors import UsageError

_COUNT = 2**31 - 1  # more would not fit into 32-bit indices
_LONG = 2**63 - 1
_FINITE = sys.float_info.max

RANGES: dict[str, tuple[float, float]] = {
    "batch_size": (1, _COUNT),
    "num_epochs": (1, _COUNT),
    "num_layers": (1, _COUNT),
    "num_classes": (1, _COUNT),
    "num_examples": (1, _LONG),
    "disp_batches": (1, _COUNT),
    "data_nthreads": (1, 1024),
    "eval_every": (0, _COUNT),
    "load_epoch": (0, _COUNT),
    "macrobatch_size": (0, _COUNT),
    "monitor": (0, _COUNT),
    "save_batches": (0, _COUNT),
    "staleness": (0, _COUNT),
    "top_k": (0, _COUNT),
    "seed": (-_LONG, _LONG),
    "lr": (0, _FINITE),
    "lr_factor": (0, _FINITE),
    "mom": (0, 1),
    "wd": (0, _FINITE),
    "warmup_epochs": (0, _FINITE),
    "gc_threshold": (0, _FINITE),
    "label_smoothing": (0, 1),
    "mixup": (0, _FINITE),
    "ema_epochs": (0, 10_000),  # with many more, the weight of one step is lost in rounding
    "target_accuracy": (0, 1),
    "pace": (0, 86_400),
}


def check_numbers(values: Mapping[str, float | None]) -> None:
    """Raise UsageError for a number out of its flag's range; ignores flags that are missing or None."""
    for name, (low, high) in RANGES.items():
        value = values.get(name)
        if value is not None and not low <= value <= high:
            shown = f"{value:g}" if isinstance(value, float) else value
            raise UsageError(f"--{name.replace('_', '-')} must be {_allowed(low, high, value)}, not {shown}")


def check_top_k(top_k: int) -> None:
    """Raise UsageError unless top-k accuracy can be measured for this k; 0 means that it is not measured."""
    if top_k < 0 or top_k == 1:
        raise UsageError(f"--top-k {top_k}: give 2 or more, or 0 for none (top-1 is the accuracy, always shown)")


def _allowed(low: float, high: float, value: float) -> str:
    if high == _FINITE:
        return f"{low} or more, and finite"
    if high in (_COUNT, _LONG) and low >= 0:
        return f"{low} or more" if value < low else f"{high} or less"
    return f"between {low} and {high}"
