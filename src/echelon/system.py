"""What Echelon asks of the operating system: the number of usable cores, and SIGTERM as an exception."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

_CGROUPS = Path("/sys/fs/cgroup")


def usable_cores(cgroups: Path = _CGROUPS) -> int:
    """Return how many cores this process may use, at least 1.

    The CPU affinity (taskset, Slurm) and the container's CPU quota both limit it. A quota of 2.5 cores counts as 2.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cpu_quota(cgroups)
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def _cpu_quota(cgroups: Path) -> float | None:
    """Return the CPU quota in cores, from cgroups version 2 or 1, or None if there is no quota."""
    try:
        if (cgroups / "cpu.max").exists():
            quota, period = (cgroups / "cpu.max").read_text().split()
        else:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            quota, period = ((cgroups / "cpu" / name).read_text().strip() for name in names)
        return None if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # not Linux, no such controller, or an unknown format
        return None


@contextmanager
def raised_by_sigterm(error: type[BaseException]) -> Iterator[None]:
    """Raise `error` when SIGTERM arrives inside the block, so that cleanup runs as after Ctrl-C.

    Further SIGTERMs are ignored. Outside the main thread this does nothing, because only the main thread may set
    signal handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: object) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)  # `timeout` sends SIGTERM twice; the second must not interrupt cleanup
        raise error

    previous = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
