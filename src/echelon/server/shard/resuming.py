"""Workers that resume after a pause: those that have waited together continue together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from echelon.cluster.messages import Resumed
from echelon.schemes import Engine
from echelon.server.shard.answer import Answer
from echelon.server.storage.lanes import Lanes


class Resuming:
    """The `Resume` requests that wait for other workers, and the last ones that were answered."""

    def __init__(self, engine: Engine, lanes: Lanes, answer: Answer) -> None:
        self._engine = engine
        self._lanes = lanes
        self._answer = answer
        self._waiting: dict[int, tuple[int, frozenset[int]]] = {}  # worker -> its Resume, and whom that waits for
        self._answered: dict[int, int] = {}  # worker -> its last Resume that was answered

    def add(self, worker: int, request: int, workers: Sequence[int]) -> None:
        """Let a paused worker take part again. It gets the clocks of its next pushes when all of `workers` resumed."""
        answered = self._answered.get(worker, -1)
        if request < answered:
            return  # a late copy: numbers of requests increase
        if request > answered:
            self._engine.resume(worker)
        answered_before = request == answered  # the answer was lost; others may wait again meanwhile
        self._waiting[worker] = request, frozenset(() if answered_before else workers)
        self.answer_complete()

    def missing(self, worker: int, request: int) -> list[int]:
        """Return the workers that a Resume waits for; none if it was answered."""
        known, others = self._waiting.get(worker, (None, frozenset[int]()))
        return sorted(others & self._engine.paused) if known == request else []

    def remove(self, worker: int) -> None:
        """Forget a worker that has left."""
        self._waiting.pop(worker, None)
        self._answered.pop(worker, None)

    def answer_complete(self) -> None:
        """Answer the workers that resumed and wait for none that is still paused."""
        paused = self._engine.paused
        for worker, (request, others) in list(self._waiting.items()):
            if not others & paused:
                del self._waiting[worker]
                self._answered[worker] = request
                clocks = {key: self._engine.clock(worker, self._lanes.lane_of(key)) for key in self._lanes.all()}
                self._answer(worker, Resumed(request, list(clocks.keys()), list(clocks.values())), ())

    def to_plain(self) -> dict[int, int]:
        """Return the last requests that were answered, by worker."""
        return self._answered

    def load_plain(self, plain: Mapping[int, int]) -> None:
        """Take over what `to_plain` returned."""
        self._answered = dict(plain)
