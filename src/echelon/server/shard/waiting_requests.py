"""The pushes and pulls without an answer: who sent them, which lanes they wait for, and how much memory they keep."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from echelon.cluster.messages import Contents
from echelon.errors import UsageError
from echelon.server.storage.memory import Framed, Window
from echelon.server.storage.rows import PushedRows
from echelon.server.storage.tables import RowOutput
from echelon.transport.outbox import Precedence

MAX_PENDING = 1 << 17  # requests of a worker without an answer
MAX_HELD_BYTES = 4 << 30  # of the frames of these requests and their answers, or eight times the store if that is more
_Position = tuple[int, int, int]  # worker, lane, clock


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A push or pull without an answer."""

    worker: int
    id: int
    clock: int  # of the pull; a push of clock c pulls at c + 1
    waiting: set[int]  # lanes that are not done
    output: Window | RowOutput | None  # where the weights go; None: a push whose answer carries no weights
    num_bytes: int  # of its frames and those of its answer
    precedence: Precedence  # of its answer
    arrived_at: float
    contents: list[Contents] = field(default_factory=list)  # of the weights in the answer, by lane
    staleness: int = 0
    rounds_ahead: int = 0
    notice: str = ""


class WaitingRequests:
    """The requests of all workers that wait."""

    def __init__(self) -> None:
        self.by_worker: dict[int, dict[int, PendingRequest]] = {}  # worker -> request id -> request
        self._held_bytes: dict[int, int] = {}  # by worker
        self.pulls: dict[_Position, list[PendingRequest]] = {}  # requests that wait for weights
        self.pushes: dict[int, list[PendingRequest]] = {}  # lane -> pushes that do not ask for weights

    def find(self, worker: int, request: int) -> PendingRequest | None:
        """Return a request, or None if it never arrived or has been answered."""
        return self.by_worker.get(worker, {}).get(request)

    def of_worker(self, worker: int) -> list[PendingRequest]:
        """Return the requests of a worker."""
        return list(self.by_worker.get(worker, {}).values())

    def of_others(self, worker: int) -> Iterator[PendingRequest]:
        """Yield the requests of all workers but this one."""
        for other, requests in self.by_worker.items():
            if other != worker:
                yield from requests.values()

    @property
    def count(self) -> int:
        """The number of requests."""
        return sum(map(len, self.by_worker.values()))

    @property
    def held_bytes(self) -> int:
        """The bytes of all requests, and of their answers."""
        return sum(self._held_bytes.values())

    def check_room(self, worker: int, num_bytes: int, store_bytes: int) -> None:
        """Raise UsageError if a worker has too many requests without an answer for one more."""
        count, held = len(self.by_worker.get(worker, ())), self._held_bytes.get(worker, 0) + num_bytes
        if count >= MAX_PENDING or (held > MAX_HELD_BYTES and held > 8 * store_bytes):
            raise UsageError(
                f"worker {worker} has {count} requests without an answer, with {held / 1e6:.0f} MB; wait for answers "
                "before you send more"
            )

    def add(self, pending: PendingRequest, lanes: Sequence[int]) -> None:
        """Add a request. One with an output waits for the weights of `lanes`."""
        self.by_worker.setdefault(pending.worker, {})[pending.id] = pending
        self._held_bytes[pending.worker] = self._held_bytes.get(pending.worker, 0) + pending.num_bytes
        if pending.output is not None:
            for lane in lanes:
                self.pulls.setdefault((pending.worker, lane, pending.clock), []).append(pending)

    def take(self, worker: int, request: int) -> PendingRequest | None:
        """Remove a request to answer it, and return it."""
        pending = self.by_worker.get(worker, {}).pop(request, None)
        if pending is not None:
            self._held_bytes[worker] -= pending.num_bytes
        return pending

    def remove(self, worker: int) -> None:
        """Drop the requests of a worker that left."""
        self.by_worker.pop(worker, None)
        self._held_bytes.pop(worker, None)
        for position in [position for position in self.pulls if position[0] == worker]:
            del self.pulls[position]
        for lane, waiting in self.pushes.items():
            self.pushes[lane] = [pending for pending in waiting if pending.worker != worker]

    def split(self, lane: int, parts: Sequence[int]) -> None:
        """Replace a lane by its parts."""
        for worker, _, clock in [position for position in self.pulls if position[1] == lane]:
            pulls = self.pulls.pop((worker, lane, clock))
            self.pulls |= {(worker, part, clock): list(pulls) for part in parts}
        if pushes := self.pushes.pop(lane, None):
            self.pushes |= {part: list(pushes) for part in parts}
        for pending in itertools.chain.from_iterable(requests.values() for requests in self.by_worker.values()):
            if lane in pending.waiting:
                pending.waiting.remove(lane)
                pending.waiting.update(parts)


def kept_bytes(memory: Window | PushedRows | RowOutput | None) -> int:
    """Return the bytes that a request or its answer keeps in this process."""
    return memory.num_bytes if isinstance(memory, Framed | PushedRows) else 0
