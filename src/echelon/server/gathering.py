"""Values that the workers of a store exchange: each sends a part, and all get the parts of all.

A round is complete when every worker that takes part has sent its part. A worker sends its next part after it has got
the answer to the one before, so the server keeps only the last complete round, for answers that were lost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from echelon.cluster.messages import Gathered
from echelon.errors import UsageError

Answer = Callable[[int, Gathered, Sequence[memoryview]], None]


class Gathering:
    """The rounds of one store. `members()` are the workers that take part; `answer(worker, …)` sends."""

    def __init__(self, members: Callable[[], Collection[int]], answer: Answer) -> None:
        self._members = members
        self._answer = answer
        self._last: dict[int, memoryview] = {}  # by rank: the parts of the last complete round
        self._answered: dict[int, int] = {}  # by rank: the requests that got them
        self._parts: dict[int, memoryview] = {}  # of the round that is not complete
        self._requests: dict[int, int] = {}  # by rank: the requests that wait for it

    def add(self, worker: int, request: int, part: memoryview) -> None:
        """Take a worker's part of the present round. A repeated request gets the same answer again."""
        if worker not in self._members():
            raise UsageError("this worker has retired, so the others do not wait for it: gather values before retire()")
        if self._answered.get(worker) == request:
            self._send(worker, request)
            return
        self._parts[worker] = memoryview(bytes(part))  # the worker may change its memory after the answer
        self._requests[worker] = request
        self.complete()

    def remove(self, worker: int) -> None:
        """Drop the request of a worker that left. The part that it has sent counts."""
        self._requests.pop(worker, None)

    def complete(self) -> None:
        """Answer everybody if nobody is missing. Called when a part arrives, and when a worker stops taking part."""
        if self._parts and not self.missing():
            self._last, self._parts = dict(sorted(self._parts.items())), {}
            self._answered, self._requests = self._requests, {}
            for worker, request in self._answered.items():
                self._send(worker, request)

    def missing(self) -> list[int]:
        """Return the workers whose part of the present round has not come."""
        return sorted(worker for worker in self._members() if worker not in self._parts)

    def holds(self, worker: int, request: int) -> bool:
        """Return whether a request waits for its round to be complete."""
        return self._requests.get(worker) == request

    def _send(self, worker: int, request: int) -> None:
        self._answer(worker, Gathered(request, list(self._last)), list(self._last.values()))
