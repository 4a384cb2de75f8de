"""Faults for tests of real jobs: how to ask for them, and the proof that they happened.

    crash = Fault(Kind.CRASH, "worker", 1, clock=3, point="worker.sent")
    run_the_job(environment=faults_in([crash]))
    check_fired(run_dir, [crash])

A job gets its faults by the environment variable ECHELON_FAULTS, a JSON list; `fault_points` lists the points. Every
process appends a line to `faults.jsonl` in the run's folder before a fault happens.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from echelon.environment import FAULTS
from echelon.faults import FILE_NAME, Fault, Kind, flip_bit

__all__ = ["Fault", "Fired", "Kind", "check_fired", "faults_in", "fired", "flip_bit", "partition", "small_disk"]


@dataclass(frozen=True, slots=True)
class Fired:
    """A fault that has happened."""

    at: float
    kind: str
    role: str
    rank: int | None
    pid: int
    clock: int | None
    point: str


def faults_in(faults: Sequence[Fault]) -> dict[str, str]:
    """Return the environment variables that make the processes of a job have these faults."""
    return {FAULTS: msgspec.json.encode(list(faults)).decode()}


def fired(run_dir: Path) -> list[Fired]:
    """Return the faults that have happened in a run, in order."""
    path = run_dir / FILE_NAME
    lines = path.read_bytes().splitlines() if path.exists() else []
    return sorted((msgspec.json.decode(line, type=Fired) for line in lines), key=lambda one: one.at)


def check_fired(run_dir: Path, faults: Sequence[Fault]) -> list[Fired]:
    """Raise AssertionError unless each fault has happened as often as it says. Return all that have happened."""
    found = fired(run_dir)
    left = list(found)
    for fault in faults:
        for count in range(fault.times):
            match = next((one for one in left if _is_of(one, fault)), None)
            assert match is not None, f"{fault} happened {count} times instead of {fault.times}; happened: {found}"
            left.remove(match)
    assert not left, f"these faults happened, and no test asked for them: {left}"
    return found


def _is_of(one: Fired, fault: Fault) -> bool:
    return one.kind == fault.kind and fault.matches(one.role, one.rank, one.point, one.clock, fault.below)


def partition(
    one_side: Sequence[str], other_side: Sequence[str], seconds: float, *, point: str, clock: int | None = None
) -> list[Fault]:
    """Return the faults that cut the processes of one side, such as "worker 1", from those of the other side.

    The cut of a process begins when it reaches the point. It concerns requests and answers between workers and servers;
    a partition of hosts, the scheduler's connections included, needs network namespaces (tests/system).
    """
    return [
        Fault(Kind.PARTITION, role, int(rank), clock, point, seconds=seconds, peers=tuple(other_side))
        for role, rank in (name.split() for name in one_side)
    ]


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """Make `folder` a file system of a few megabytes, so that writes really fail with ENOSPC. Needs root."""
    if os.geteuid():
        raise PermissionError("only root can mount a file system; use the fault disk-full instead")
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
