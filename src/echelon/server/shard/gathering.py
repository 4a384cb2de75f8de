"""Values that the workers of a store exchange: each sends a part, and all get the parts of all.

A round is complete when every worker that takes part has sent its part. A worker sends its next part after it has got
the answer to the one before, so the server keeps only the last complete round, for answers that were lost.

Values about different things are exchanged in rounds of their own. A worker that joins a running job may come when the
others are between two exchanges. It is new until it has trained together with others, and no round waits for a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from echelon.cluster.messages import Gathered
from echelon.errors import UsageError

Answer = Callable[[int, Gathered, Sequence[memoryview]], None]
MAX_SUBJECTS = 1000  # of the values of one store


class Gathering:
    """Rounds of one kind. `members()` are the workers that take part, of which no round waits for the `new` ones."""

    def __init__(self, members: Callable[[], Collection[int]], answer: Answer, new: Collection[int] = ()) -> None:
        self._members = members
        self._new = new
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
        if request < self._answered.get(worker, 0):
            return  # a late copy of a request of an earlier round: numbers of requests increase
        self._parts[worker] = memoryview(bytes(part))  # the worker may change its memory after the answer
        self._requests[worker] = request
        self.complete()

    def remove(self, worker: int) -> None:
        """Drop the request of a worker that left. The part that it has sent counts."""
        self._requests.pop(worker, None)
        self._answered.pop(worker, None)  # the requests of another process with its rank may have the same numbers

    def complete(self) -> None:
        """Answer everybody if nobody is missing. Called when a part arrives, and when a worker stops taking part."""
        if self._parts and not self.missing():
            self._last, self._parts = dict(sorted(self._parts.items())), {}
            self._answered, self._requests = self._requests, {}
            for worker, request in self._answered.items():
                self._send(worker, request)

    def to_plain(self) -> dict[str, Any]:
        """Return the rounds as numbers, bytes and dicts."""
        return {
            "last": {rank: bytes(part) for rank, part in self._last.items()},
            "answered": self._answered,
            "parts": {rank: bytes(part) for rank, part in self._parts.items()},
            "requests": self._requests,
        }

    def load_plain(self, plain: dict[str, Any]) -> None:
        """Take over what `to_plain` returned."""
        self._last = {rank: memoryview(part) for rank, part in plain["last"].items()}
        self._parts = {rank: memoryview(part) for rank, part in plain["parts"].items()}
        self._answered, self._requests = dict(plain["answered"]), dict(plain["requests"])

    def missing(self) -> list[int]:
        """Return the workers whose part of the present round has not come."""
        return sorted(w for w in self._members() if w not in self._parts and w not in self._new)

    def waits_for(self, worker: int) -> bool:
        """Return whether the present round has begun and lacks a worker's part."""
        return bool(self._parts) and worker in self._members() and worker not in self._parts

    def holds(self, worker: int, request: int) -> bool:
        """Return whether a request waits for its round to be complete."""
        return self._requests.get(worker) == request

    def _send(self, worker: int, request: int) -> None:
        self._answer(worker, Gathered(request, list(self._last)), list(self._last.values()))


class Gatherings:
    """The rounds of one store, by what they are about. `present()` are the workers that take part."""

    def __init__(self, present: Callable[[], Collection[int]], answer: Answer) -> None:
        self._present = present
        self._answer = answer
        self._by_subject: dict[str, Gathering] = {}
        self._new: set[int] = set()  # workers that joined later and have not trained together with others

    def admit(self, worker: int) -> None:
        """Record that a worker has joined the job later."""
        self._new.add(worker)

    def is_new(self, worker: int) -> bool:
        """Return whether no round waits for a worker yet."""
        return worker in self._new

    def settle(self, worker: int) -> None:
        """Let rounds wait for a worker that was new: it trains together with others, or joined before they began."""
        self._new.discard(worker)

    def add(self, worker: int, request: int, part: memoryview, about: str) -> None:
        """Take a worker's part of the present round about something."""
        if about not in self._by_subject and len(self._by_subject) >= MAX_SUBJECTS:
            raise UsageError(f"values about {MAX_SUBJECTS} different things were exchanged, which is the limit")
        self._rounds(about).add(worker, request, part)

    def remove(self, worker: int) -> None:
        """Drop the requests of a worker that left. The parts that it has sent count."""
        self._new.discard(worker)
        for rounds in self._by_subject.values():
            rounds.remove(worker)

    def complete(self) -> None:
        """Answer the rounds in which nobody is missing."""
        for rounds in self._by_subject.values():
            rounds.complete()

    def waits_for(self, worker: int) -> bool:
        """Return whether a round has begun and lacks a worker's part."""
        return any(rounds.waits_for(worker) for rounds in self._by_subject.values())

    def missing(self, worker: int, request: int) -> list[int] | None:
        """Return the workers that a request waits for; None if it does not wait."""
        waiting = (rounds for rounds in self._by_subject.values() if rounds.holds(worker, request))
        return next((rounds.missing() for rounds in waiting), None)

    def to_plain(self) -> dict[str, Any]:
        """Return the rounds as numbers, bytes and dicts."""
        return {"new": sorted(self._new), "rounds": {about: one.to_plain() for about, one in self._by_subject.items()}}

    def load_plain(self, plain: dict[str, Any]) -> None:
        """Take over what `to_plain` returned."""
        self._new.update(plain["new"])
        for about, rounds in plain["rounds"].items():
            self._rounds(about).load_plain(rounds)

    def _rounds(self, about: str) -> Gathering:
        return self._by_subject.setdefault(about, Gathering(self._present, self._answer, self._new))
