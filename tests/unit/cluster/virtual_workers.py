"""Workers of given speeds that train a ledger's leases on a virtual clock."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

from echelon.cluster.ledger.ledger import Ledger, ToWorker
from echelon.cluster.messages import Lease, LedgerEnded, OpenLedger

LATENCY_S = 0.001  # of a message


class VirtualWorkers:
    """Worker i needs `seconds[i]` per step. It asks for a lease when it begins the last batch of the one before.

    `now` is the time of the last event, and `samples` how many each has trained.
    """

    def __init__(self, opened: OpenLedger, seconds: list[float]) -> None:
        self.now = 0.0
        self.samples = [0] * len(seconds)
        self._seconds = seconds
        self._ledger = Ledger(opened, 1, range(len(seconds)))
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._ready: list[list[tuple[Lease, int]]] = [[] for _ in seconds]  # batches, as (lease, number from 0)
        self._requests = [0] * len(seconds)
        self._asks = [False] * len(seconds)
        self._is_idle = [True] * len(seconds)
        for rank in range(len(seconds)):
            self._deliver(self._ledger.open(rank, opened))
        for rank in range(len(seconds)):
            self._ask(rank)

    def run(self) -> None:
        """Train to the end."""
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()
        assert self._ledger.has_ended, "all workers wait"

    def _after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), event))

    def _ask(self, rank: int) -> None:
        if not self._asks[rank]:
            self._asks[rank] = True
            self._requests[rank] += 1
            self._after(LATENCY_S, lambda: self._deliver(self._ledger.take(rank, self._requests[rank], 0)))

    def _deliver(self, sends: list[ToWorker]) -> None:
        for rank, message in sends:
            if isinstance(message, Lease | LedgerEnded):
                self._after(LATENCY_S, lambda rank=rank, message=message: self._receive(rank, message))  # type: ignore[misc]

    def _receive(self, rank: int, message: Lease | LedgerEnded) -> None:
        if isinstance(message, Lease):
            self._asks[rank] = False
            self._ready[rank] += [(message, number) for number in range(len(message.batches))]
            if self._is_idle[rank]:
                self._step(rank)

    def _step(self, rank: int) -> None:
        self._is_idle[rank] = False
        lease, number = self._ready[rank].pop(0)
        if not self._ready[rank]:
            self._ask(rank)
        self._after(self._seconds[rank], lambda: self._end_step(rank, lease, number))

    def _end_step(self, rank: int, lease: Lease, number: int) -> None:
        start, stop = lease.batches[number]
        self.samples[rank] += stop - start
        if number + 1 == len(lease.batches):
            spent = self._seconds[rank] * len(lease.batches)
            self._after(
                LATENCY_S, lambda: self._deliver(self._ledger.trained(rank, lease.number, len(lease.batches), spent))
            )
        if self._ready[rank]:
            self._step(rank)
        else:
            self._is_idle[rank] = True
            self._ask(rank)
