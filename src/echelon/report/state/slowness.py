"""Which workers are slow, and why.

A worker is judged by its own time per step: that between the servers' answer and its next push, as the servers measure
it. In lock-step all workers have the same rate, and the fast ones wait for the slow one, so rates and waits do not say
who is slow; arrivals do. Without servers, the own time is what the worker measures between two waits.

The worker's phases only explain the verdict: whether it computes longer than others, or its messages come late.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from echelon.report.state.run import RunState
from echelon.report.state.worker import WorkerState

SLOW = 1.5  # times the median of the others
LEAST_S = 1e-3  # of difference: below it, the noise of the scheduler decides


@dataclass(frozen=True, slots=True)
class Slow:
    """A worker whose own time is long. `factor`: times the median of the other workers."""

    rank: int
    factor: float
    own_s: float
    median_s: float
    why: str


def own_times(state: RunState) -> dict[int, float]:
    """Return the own time per step of every worker that trains and has made steps: the longest that a server sees."""
    found: dict[int, float] = {}
    for worker in state.active:
        seen = [
            arrival.own_s
            for server in state.servers.values()
            if (arrival := server.arrivals.get(worker.rank)) is not None and arrival.own_s is not None
        ]
        if seen:
            found[worker.rank] = max(seen)
        elif worker.steps and not state.servers:
            found[worker.rank] = statistics.median(step.compute + step.push for step in worker.steps)
    return found


def slow_workers(state: RunState) -> list[Slow]:
    """Return the workers whose own time is at least SLOW times the median of the others, the slowest first."""
    times = own_times(state)
    found = []
    for rank, own_s in times.items():
        others = [time for other, time in times.items() if other != rank]
        if not others:
            continue
        median_s = statistics.median(others)
        if own_s >= SLOW * median_s and own_s - median_s >= LEAST_S:
            why = _explain(state.workers, rank, own_s, median_s)
            found.append(Slow(rank, own_s / max(median_s, 1e-9), own_s, median_s, why))
    return sorted(found, key=lambda slow: -slow.factor)


def _explain(workers: Mapping[int, WorkerState], rank: int, own_s: float, median_s: float) -> str:
    """Say whether the worker computes longer than others, or its pushes take longer to arrive."""
    computes = {
        other: statistics.median(step.compute for step in worker.steps)
        for other, worker in workers.items()
        if worker.steps
    }
    others = [seconds for other, seconds in computes.items() if other != rank]
    times = f"{_ms(own_s)} per step, where the median of the others is {_ms(median_s)}"
    if rank not in computes or not others:
        return times
    more_s = computes[rank] - statistics.median(others)
    if more_s >= (own_s - median_s) / 2:
        return f"{times}: it computes for {_ms(computes[rank])} (others {_ms(statistics.median(others))})"
    return f"{times}: it computes as long as others, and its pushes arrive late (its network, or a busy machine)"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.1f} ms"
