"""Which numbers the flags of training take: one table, looked at before anything starts. NaN is in no range.

What is done to images has its own ranges, in `AugmentConfig`; switches (`--benchmark 1`) take any whole number.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from echelon.errors import UsageError

_COUNT = 2**31 - 1  # of what is counted: more fits into no array of indices that others make of it
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
    "ema_epochs": (0, 10_000),  # over many more, a step's share is lost in rounding
    "target_accuracy": (0, 1),
    "pace": (0, 86_400),
}


def check_numbers(values: Mapping[str, float | None]) -> None:
    """Refuse a number that its flag does not take; flags that are not there or not given are left out."""
    for name, (low, high) in RANGES.items():
        value = values.get(name)
        if value is not None and not low <= value <= high:
            shown = f"{value:g}" if isinstance(value, float) else value
            raise UsageError(f"--{name.replace('_', '-')} must be {_allowed(low, high, value)}, not {shown}")


def check_top_k(top_k: int) -> None:
    """Refuse what is no number of best classes."""
    if top_k < 0 or top_k == 1:
        raise UsageError(f"--top-k {top_k}: give 2 or more, or 0 for none (top-1 is the accuracy, always shown)")


def _allowed(low: float, high: float, value: float) -> str:
    if high == _FINITE:
        return f"{low} or more, and finite"
    if high in (_COUNT, _LONG) and low >= 0:
        return f"{low} or more" if value < low else f"{high} or less"
    return f"between {low} and {high}"
