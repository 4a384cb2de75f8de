"""The faults: what each does to a job, whether it is possible now, and which events show that the job has recovered."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from echelon.testing.chaos.job import ChaosJob, Place

RECOVER_S = 60.0
HEARTBEAT_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class Injection:
    """A kind of fault. `act(job, random numbers)` does it and waits for the recovery; False: the job ended first."""

    name: str
    is_possible: Callable[[ChaosJob], bool]
    act: Callable[[ChaosJob, random.Random], bool]


def kill_worker(job: ChaosJob, draw: random.Random) -> bool:
    """Kill a worker. Its launcher starts it again, maybe with another rank, and it takes part again.

    The scheduler assigns the rank of a worker that joined with `echelon join`: the lowest that is free.
    """
    place = _a_worker(job, draw)
    before = set(job.progress.pids.values())

    def new() -> list[int]:
        return [rank for (role, rank), pid in job.progress.pids.items() if role == "worker" and pid not in before]

    if not job.signal(place, signal.SIGKILL):
        return False
    return _wait(job, lambda: bool(new()), f"{_name(place)} starts again") and _takes_part(job, new()[0])


def stop_worker(job: ChaosJob, draw: random.Random) -> bool:
    """Stop a worker for a while, which may be longer than the heartbeat timeout. It returns, or joins again."""
    return _stop(job, _a_worker(job, draw), draw)


def stop_server(job: ChaosJob, draw: random.Random) -> bool:
    """Stop a server for less than the heartbeat timeout."""
    return _stop(job, ("server", draw.randrange(job.setting.num_servers)), draw, longest_s=HEARTBEAT_TIMEOUT_S / 2)


def stop_scheduler(job: ChaosJob, draw: random.Random) -> bool:
    """Stop the scheduler for a while, which may be longer than the heartbeat timeout."""
    return _stop(job, ("scheduler", 0), draw)


def kill_server(job: ChaosJob, draw: random.Random) -> bool:
    """Kill a server. The launcher starts it again. Its backup continues; without one, workers give it the weights."""
    place = "server", draw.randrange(job.setting.num_servers)
    pid, backups = job.progress.pids[place], job.setting.replicas > 0
    if not job.signal(place, signal.SIGKILL):
        return False
    if not _wait(job, lambda: job.progress.pids[place] != pid, f"{_name(place)} starts again"):
        return False
    stored: Callable[[], bool] = lambda: not (job.progress.lacks_primaries or (backups and job.progress.lacks_backups))  # noqa: E731
    return _wait(job, stored, "every slice is stored, and has a backup")


def kill_scheduler(job: ChaosJob, draw: random.Random) -> bool:
    """Kill the scheduler. The launcher starts it again, and it learns the members from the living."""
    restarted = job.progress.counts["scheduler_restarted"]
    if not job.signal(("scheduler", 0), signal.SIGKILL):
        return False
    return _wait(job, lambda: job.progress.counts["scheduler_restarted"] > restarted, "the scheduler starts again")


def end_worker(job: ChaosJob, draw: random.Random) -> bool:
    """Send SIGTERM to a worker: it leaves, and the others continue."""
    place = _a_worker(job, draw)
    if not job.signal(place, signal.SIGTERM):
        return False
    return _wait(job, lambda: place[1] not in job.progress.workers, f"worker {place[1]} leaves")


def join_worker(job: ChaosJob, draw: random.Random) -> bool:
    """Let one more worker join the job."""
    before, joiner = set(job.progress.workers), job.join()
    if joiner is None:
        return False

    def new() -> set[int]:
        return set(job.progress.workers) - before

    if not job.wait_until(lambda: bool(new()) or joiner.has_failed, "a worker joins", RECOVER_S):
        return False
    job.raise_if_refused(joiner)
    return bool(new()) and _takes_part(job, min(new()))


INJECTIONS = {
    injection.name: injection
    for injection in (
        Injection("kill worker", lambda job: len(job.progress.workers) > 1, kill_worker),
        Injection("stop worker", lambda job: len(job.progress.workers) > 1, stop_worker),
        Injection("kill server", lambda job: True, kill_server),
        Injection("stop server", lambda job: True, stop_server),
        Injection("kill scheduler", lambda job: True, kill_scheduler),
        Injection("stop scheduler", lambda job: True, stop_scheduler),
        Injection("join", lambda job: len(job.progress.workers) < job.setting.num_workers + 2, join_worker),
        Injection("SIGTERM worker", lambda job: len(job.progress.workers) > 2, end_worker),
    )
}


def _a_worker(job: ChaosJob, draw: random.Random) -> Place:
    return "worker", draw.choice(job.progress.workers)


def _stop(job: ChaosJob, place: Place, draw: random.Random, longest_s: float = 2 * HEARTBEAT_TIMEOUT_S) -> bool:
    seconds = draw.uniform(0.1, longest_s)
    before = job.progress.by_worker.copy()
    if not job.signal(place, signal.SIGSTOP):
        return False
    end = time.monotonic() + seconds  # the time is the fault itself
    job.wait_until(lambda: time.monotonic() >= end, f"{seconds:.1f} s", seconds + 1)
    job.signal(place, signal.SIGCONT)
    if place[0] == "worker":
        rank = place[1]
        return _wait(job, lambda: job.progress.by_worker[rank] > before[rank], f"{place} takes part again")
    return _wait(job, lambda: True, f"the others continue after {place} was stopped")


def _takes_part(job: ChaosJob, rank: int) -> bool:
    """Wait until a worker that is new in the job has a part in an update."""
    before = job.progress.by_worker[rank]
    return _wait(job, lambda: job.progress.by_worker[rank] > before, f"worker {rank}, which is new, takes part")


def _name(place: Place) -> str:
    return f"{place[0]} {place[1]}"


def _wait(job: ChaosJob, condition: Callable[[], bool], what: str) -> bool:
    """Wait for the events of a recovery, and then for an update on every slice."""
    if not job.wait_until(condition, what, RECOVER_S):
        return False
    before = job.progress.by_slice.copy()
    slices = range(job.setting.num_servers)
    updated: Callable[[], bool] = lambda: all(job.progress.by_slice[one] > before[one] for one in slices)  # noqa: E731
    return job.wait_until(updated, f"an update on every slice after: {what}", RECOVER_S)
