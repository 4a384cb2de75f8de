"""What Echelon asks of the operating system: usable cores, open files, kept memory, signals, its own source files."""

from __future__ import annotations

import ctypes
import hashlib
import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

PACKAGE = Path(__file__).parent  # Echelon's source code
KEPT_BYTES = 512 << 20
BLOCK_BYTES = 64 << 20
LARGEST_INT = (1 << 31) - 1
_CGROUPS = Path("/sys/fs/cgroup")
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8  # of glibc's mallopt


def usable_cores(cgroups: Path = _CGROUPS) -> int:
    """Return how many cores this process may use, at least 1.

    The CPU affinity (taskset, Slurm) and the container's CPU quota both limit it. A quota of 2.5 cores counts as 2.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cpu_quota(cgroups)
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def machine_memory() -> int:
    """Return the bytes of memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Return the memory that this process uses now; 0 if the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


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


def code_digest() -> str:
    """Return a digest of Echelon's source code, which must be the same on all hosts of a job."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(str(path.relative_to(PACKAGE)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def raise_file_limit() -> None:
    """Let this process open as many files and connections as the hard limit allows. The soft one is often 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # a hard limit of "unlimited" may be above what the kernel accepts
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def keep_freed_memory(block_bytes: int = BLOCK_BYTES, kept_bytes: int = KEPT_BYTES, *, one_arena: bool = False) -> None:
    """Let glibc reuse freed blocks smaller than `block_bytes`, and keep up to `kept_bytes` of free memory.

    By default glibc maps each block of several megabytes and unmaps it when it is freed, so that the kernel zeroes its
    pages every time. This took a third to a half of the time of a ResNet-50 step over TCP, and a third of the CPU time
    of a worker that trains a network of 25 million weights. With other C libraries this function does nothing.

    `one_arena`: all threads share one arena; for processes in which a thread frees what another has allocated.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_M_MMAP_THRESHOLD, min(block_bytes, LARGEST_INT))
    mallopt(_M_TRIM_THRESHOLD, min(kept_bytes, LARGEST_INT))
    mallopt(_M_TOP_PAD, 16 << 20)
    if one_arena:
        mallopt(_M_ARENA_MAX, 1)


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


@contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """Let Ctrl-C inside the block end the process at once, with one line and status 130.

    For imports, which take seconds: KeyboardInterrupt would show where an import was, and some modules turn it into an
    ImportError. Nothing may need to be cleaned up. Does nothing where a program handles the signal itself.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def handle(number: int, frame: object) -> NoReturn:
        os.write(2, b"stopped by SIGINT\n")
        os._exit(128 + number)

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
