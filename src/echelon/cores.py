"""How many cores this process may use: those it is bound to (taskset, Slurm), within the time its container has."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def usable_cores(cgroups: Path = _CGROUPS) -> int:
    """At least 1. A quota of two and a half cores counts as two."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(cgroups)
    return bound if quota is None else max(1, min(bound, int(quota)))


def _quota(cgroups: Path) -> float | None:
    """In cores, by either version of Linux's control groups as a container sees them; None where there is none."""
    try:
        if (cgroups / "cpu.max").exists():
            allowed, period = (cgroups / "cpu.max").read_text().split()
        else:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            allowed, period = ((cgroups / "cpu" / name).read_text().strip() for name in names)
        return None if allowed in ("max", "-1") else int(allowed) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # not Linux, no such controller, or an unknown format
        return None
