"""What a worker that joins a running job needs besides the keys: frozen parameters and buffers of a worker that trains.

One of the others sends a copy after the view has changed. It is kept until the next one comes, so that a lost answer
can be sent again. The server does not know what is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from echelon.cluster.messages import ValuesGiven

Answer = Callable[[int, ValuesGiven, Sequence[memoryview]], None]


class ValuesForNewcomers:
    """The last copy, and the requests that wait for a newer one. `answer(worker, …)` sends."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._view = -1  # that the giver of the copy had received
        self._frames: list[memoryview] = []
        self._waiting: dict[int, tuple[int, int]] = {}  # worker -> its request, and the first view that it accepts

    def give(self, view: int, frames: Sequence[memoryview]) -> None:
        """Keep a copy, and answer those who wait for it."""
        if view < self._view:
            return  # a late copy of the message
        self._view, self._frames = view, [memoryview(bytes(frame)) for frame in frames]
        for worker, (request, first) in list(self._waiting.items()):
            self.take(worker, request, first)

    def take(self, worker: int, request: int, view: int) -> None:
        """Answer a worker with a copy of this view or a later one, as soon as there is one."""
        self._waiting[worker] = request, view
        if self._view >= view:
            del self._waiting[worker]
            self._answer(worker, ValuesGiven(request), self._frames)

    def remove(self, worker: int) -> None:
        """Drop the request of a worker that left."""
        self._waiting.pop(worker, None)

    def holds(self, worker: int, request: int) -> bool:
        """Return whether a request waits."""
        return self._waiting.get(worker, (None,))[0] == request
