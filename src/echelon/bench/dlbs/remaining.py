"""How long the rest of a sweep will take. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


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


def shown_duration(seconds: float | None) -> str:
    """Return a duration as `1:05` or `2:00:00`."""
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
