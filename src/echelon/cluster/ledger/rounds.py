"""How many samples a worker gets at a time: leases of a few batches, blocks of lock-step rounds, and sizes by speed.

Relaxed: a lease has up to `MAX_BATCHES` batches. Towards the end of an epoch it has half of a worker's share of what is
left, by its speed, so that all workers end together.

Lock-step: a round takes the next W x B positions, of which the worker with index i gets [base + i*B, base + (i+1)*B):
the samples that one worker with batches of W x B would use. A block is up to `MAX_ROUNDS` rounds. The last round of an
epoch divides what is left evenly. A batch is adjacent positions, so where positions of a lost worker have returned to
the pool, batches can be smaller than B.

By speed (LB-BSP): the sizes of a round's batches are in proportion to the speeds of the workers, and their sum stays
W x B, so that all end a round together and an update has as many samples as before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction

from echelon.cluster.ledger.intervals import Interval, IntervalSet

MAX_BATCHES = 4  # of a lease
MAX_ROUNDS = 4  # of a block
SMOOTHING = 0.5  # the weight of the newest measurement in a worker's speed


def take_lease(pool: IntervalSet, batch_size: int, share: float) -> list[Interval]:
    """Take the batches of a worker's next lease from the pool. `share`: of the work of all, that it does."""
    remaining = -(-len(pool) // batch_size)
    count = max(1, min(MAX_BATCHES, int(remaining * share / 2)))
    return [pool.take_first(batch_size) for _ in range(count) if pool]


def is_tail(pool: IntervalSet, batch_size: int, num_workers: int) -> bool:
    """Return whether so little is left that no worker should have a batch in reserve that another could train now."""
    return len(pool) <= 2 * max(1, num_workers) * batch_size


def take_block(pool: IntervalSet, sizes: Mapping[int, int]) -> dict[int, list[Interval]]:
    """Take a block of rounds from the pool. Return the batches of each worker, one per round; some may be empty."""
    shares: dict[int, list[Interval]] = {worker: [] for worker in sizes}
    whole = sum(sizes.values())
    for _ in range(MAX_ROUNDS):
        if not pool:
            break
        left = len(pool)
        limits = sizes if left >= whole else divide(left, [(worker, Fraction(size)) for worker, size in sizes.items()])
        for worker, limit in limits.items():
            shares[worker].append(pool.take_first(limit))
    return shares


def sizes_of(
    workers: Sequence[int], batch_size: int, speeds: Mapping[int, float] | None = None, limit: int = 0
) -> dict[int, int]:
    """Return the size of each worker's batches: equal, or in proportion to `speeds` if all of them are known.

    With a `limit` above 0, which is at least `batch_size`, no batch is larger; others have what would be above it.
    """
    if speeds is None or any(worker not in speeds for worker in workers):
        return dict.fromkeys(workers, batch_size)
    weights = [(worker, Fraction(speeds[worker])) for worker in workers]
    spare = (batch_size - 1) * len(workers)  # each worker has one sample at least: it must see how fast it is now
    sizes: dict[int, int] = {}
    parts = divide(spare, weights)
    while limit and (full := [worker for worker, part in parts.items() if 1 + part > limit]):
        sizes |= dict.fromkeys(full, limit)
        spare -= (limit - 1) * len(full)
        weights = [(worker, weight) for worker, weight in weights if worker not in sizes]
        parts = divide(spare, weights)
    sizes |= {worker: 1 + part for worker, part in parts.items()}
    return {worker: sizes[worker] for worker in workers}


def divide(total: int, weights: Sequence[tuple[int, Fraction]]) -> dict[int, int]:
    """Divide a number in proportion to weights, which are above 0. The largest remainders are rounded up."""
    whole = sum(weight for _, weight in weights)
    exact = {worker: total * weight / whole for worker, weight in weights}
    parts = {worker: int(part) for worker, part in exact.items()}
    missing = total - sum(parts.values())
    for worker in sorted(exact, key=lambda one: (parts[one] - exact[one], one))[:missing]:
        parts[worker] += 1
    return parts


class Speeds:
    """How many samples per second each worker trains, smoothed."""

    def __init__(self) -> None:
        self.by_worker: dict[int, float] = {}

    def measure(self, worker: int, samples: int, seconds: float) -> None:
        """Add a measurement. One without samples or time says nothing."""
        if samples > 0 and 0.0 < seconds < float("inf"):
            new = samples / seconds
            old = self.by_worker.get(worker, new)
            self.by_worker[worker] = old + SMOOTHING * (new - old)

    def share(self, worker: int, workers: Collection[int]) -> float:
        """Return which part of the work of all workers one does; if a speed is not known, all do the same."""
        if any(other not in self.by_worker for other in workers):
            return 1 / max(1, len(workers))
        return self.by_worker[worker] / sum(self.by_worker[other] for other in workers)

    def others_finish_sooner(self, worker: int, batch: int, pool: int, held: Mapping[int, int]) -> bool:
        """Return whether faster workers train all of the pool before `worker` has trained one batch of it.

        `held`: the samples that each worker has to train before. The fastest worker never waits for others, so somebody
        always takes what is left.
        """
        own = self.by_worker.get(worker)
        if own is None or any(other not in self.by_worker for other in held):
            return False
        faster = [other for other in held if self.by_worker[other] > own]
        if not faster:
            return False
        speed = sum(self.by_worker[other] for other in faster)
        fluid = (pool + sum(held[other] for other in faster)) / speed
        return (held[worker] + batch) / own > fluid + batch / max(self.by_worker[other] for other in faster)

    def forget(self, worker: int) -> None:
        """Remove a worker that has left."""
        self.by_worker.pop(worker, None)
