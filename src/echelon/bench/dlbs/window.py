"""Times and rates of workers from when each of their batches ended. Pure.

The rate of all workers is the sum of their rates over one common window: from when the last worker has finished its
warm-up until the first worker has finished its last batch. Only in that window do all of them work. Multiplying the
rate of one worker by their number would be wrong for workers that do not wait for each other, or differ in speed.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from echelon.bench.harness.turns import percentile
from echelon.errors import DataError


class Window(NamedTuple):
    """A span of time in which all workers run measured batches, in seconds since their common start."""

    start: float
    end: float


@dataclass(frozen=True, slots=True)
class WorkerTimes:
    """When each batch of a worker, or of one of its devices, ended: seconds since the start common to all workers."""

    rank: int
    batch_size: int
    ends: tuple[float, ...]
    device: int = 0

    @property
    def name(self) -> str:
        """How messages name it."""
        return f"worker {self.rank}" + (f", device {self.device}" if self.device else "")

    def batch_ms(self, num_warmup: int) -> list[float]:
        """Return the milliseconds of every batch after the warm-up. The first batch begins at the common start."""
        starts = (0.0, *self.ends[:-1])
        return [1000 * (end - start) for start, end in zip(starts, self.ends, strict=True)][num_warmup:]

    def batches_until(self, moment: float) -> float:
        """Return how many batches had run at a moment; of the running one, the part of its duration that had passed."""
        done = bisect_right(self.ends, moment)
        if done == len(self.ends):
            return float(done)
        start = self.ends[done - 1] if done else 0.0
        return done + max(0.0, moment - start) / (self.ends[done] - start)

    def rate(self, window: Window) -> float:
        """Return the samples per second in a window."""
        batches = self.batches_until(window.end) - self.batches_until(window.start)
        return batches * self.batch_size / (window.end - window.start)


def check_complete(workers: Sequence[WorkerTimes], num_warmup: int, num_batches: int) -> None:
    """Raise DataError if a worker ran fewer batches than it should, for example because its data has ended."""
    if not workers:
        raise DataError("no worker reported its batch times")
    for worker in workers:
        wanted = num_warmup + num_batches
        if len(worker.ends) < wanted:
            raise DataError(
                f"{worker.name} ran {len(worker.ends)} of {wanted} batches: the data has too few samples; lower "
                "exp.num_batches, or use more data"
            )


def common_window(workers: Sequence[WorkerTimes], num_warmup: int) -> Window:
    """Return the window in which every worker runs measured batches; raises DataError if there is none."""

    def warm(worker: WorkerTimes) -> float:
        return worker.ends[num_warmup - 1] if num_warmup else 0.0

    last, first = max(workers, key=warm), min(workers, key=lambda worker: worker.ends[-1])
    if warm(last) >= first.ends[-1]:
        raise DataError(
            f"the workers have no common window: {last.name} ended its warm-up after {warm(last):.3f} s, when "
            f"{first.name} had ended its last batch, after {first.ends[-1]:.3f} s; raise exp.num_batches or lower "
            "exp.num_warmup_batches"
        )
    return Window(warm(last), first.ends[-1])


def throughput(workers: Sequence[WorkerTimes], window: Window) -> float:
    """Return the samples per second of all workers together: the sum of their rates in one window."""
    return math.fsum(worker.rate(window) for worker in workers)


def results(workers: Sequence[WorkerTimes], num_warmup: int, num_batches: int) -> dict[str, object]:
    """Return the `results.*` of an experiment: batch times in milliseconds, rates in samples per second."""
    check_complete(workers, num_warmup, num_batches)
    window = common_window(workers, num_warmup)
    per_worker = [worker.batch_ms(num_warmup) for worker in workers]
    times = [one for batch_ms in per_worker for one in batch_ms]
    return {
        "results.time": round(statistics.fmean(times), 4),
        "results.time_std": round(statistics.pstdev(times), 4),
        "results.time_min": round(min(times), 4),
        "results.time_p50": round(percentile(times, 0.5), 4),
        "results.time_p90": round(percentile(times, 0.9), 4),
        "results.time_p99": round(percentile(times, 0.99), 4),
        "results.time_max": round(max(times), 4),
        "results.throughput": round(throughput(workers, window), 3),
        "results.window": [round(window.start, 6), round(window.end, 6)],
        "results.worker_rank": [worker.rank for worker in workers],
        "results.worker_time": [round(statistics.fmean(batch_ms), 4) for batch_ms in per_worker],
        "results.worker_throughput": [round(worker.rate(window), 3) for worker in workers],
        "results.time_data": [round(one, 4) for one in times],
        "results.worker_time_data": [[round(one, 4) for one in batch_ms] for batch_ms in per_worker],
    }
