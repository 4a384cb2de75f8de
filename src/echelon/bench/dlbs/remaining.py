"""How long the rest of a sweep will take. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from echelon.report.terminal.lines import duration


def seconds_left(finished: Sequence[float], elapsed: float, share: float, num_after: int) -> float | None:
    """Return the seconds until the end of a sweep, or None while nothing is known.

    `finished` has the durations of experiments that ran. The current one runs since `elapsed` seconds and has done
    `share` of its batches; `num_after` follow. Starting a job takes time without batches, so the duration of whole
    experiments is a better guide than the rate of batches.
    """
    if finished:
        typical = statistics.fmean(finished)
    elif share > 0:
        typical = elapsed / share
    else:
        return None
    return max(typical * (1 - share) if share else typical - elapsed, 0.0) + typical * num_after


def shown_left(seconds: float | None) -> str:
    """Return the time left as text."""
    return "-:--" if seconds is None else duration(seconds)
