"""Which requests for the norm of a round can be answered, on one server.

To clip by the global norm, a worker that has pushed all keys of a step asks each server for the squared norm of the
round's sum over these keys. A server can answer when the round of every lane is gathered. The worker adds the answers
of all servers and releases the rounds with the scale that follows from the total.

All workers of a group must compute the same scale, so a round has one answer: the first one is kept and repeated to
everybody who asks, also after the round was applied. It is kept until the next round of the same keys, which cannot be
complete before every worker of the group has received this one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from echelon.errors import UsageError

MAX_WAITING = 4096  # requests of one worker
MAX_KNOWN = 4096  # lists of keys
DIFFERENT_KEYS = "the workers of a group asked for the norm of different keys; all must train the same parameters"


@dataclass(slots=True, eq=False)
class NormRequest:
    """A worker's question for the squared norm of `keys` in round `clock` of its group."""

    worker: int
    id: int
    keys: tuple[int, ...]
    clock: int
    max_norm: float | None  # None: the worker releases the round itself
    lanes: list[int] = field(default_factory=list)


def scale_to_clip(square: float, max_norm: float) -> float:
    """Return what torch.nn.utils.clip_grad_norm_ multiplies gradients by: at most 1; NaN if the norm is NaN."""
    scale = max_norm / (math.sqrt(square) + 1e-6)
    return 1.0 if scale > 1 else scale


class _Known(NamedTuple):
    clock: int
    square: float


class Norms:
    """The squared norms of gathered rounds, and the requests that wait for more of them."""

    def __init__(self) -> None:
        self._squares: dict[tuple[int, int, int], float] = {}  # (group, lane, clock), until the round is released
        self._waiting: dict[int, list[NormRequest]] = {}  # by group
        self._known: dict[tuple[int, tuple[int, ...]], _Known] = {}  # (group, keys) -> the last answer

    def find(self, worker: int, request: int) -> NormRequest | None:
        """Return a request that waits, or None."""
        waiting = (one for requests in self._waiting.values() for one in requests)
        return next((one for one in waiting if (one.worker, one.id) == (worker, request)), None)

    def first_missing(self, group: int, request: NormRequest) -> int:
        """Return a lane whose round is not gathered yet."""
        missing = (lane for lane in request.lanes if (group, lane, request.clock) not in self._squares)
        return next(missing, request.lanes[0])

    def ask(self, group: int, request: NormRequest, clocks: Iterable[int]) -> float | None:
        """Return the answer, or None: the request then waits. `clocks`: the rounds that each lane has applied."""
        known = self._known.get((group, request.keys))
        if known is not None and known.clock == request.clock:
            return known.square
        if any(clock > request.clock for clock in clocks):
            raise UsageError(DIFFERENT_KEYS)
        if self.find(request.worker, request.id) is not None:
            return None  # it was sent twice
        if sum(one.worker == request.worker for one in self._waiting.get(group, ())) >= MAX_WAITING:
            raise UsageError(f"worker {request.worker} waits for {MAX_WAITING} norms; wait for their answers first")
        self._waiting.setdefault(group, []).append(request)
        return self._answer(group, request)

    def gathered(self, group: int, lane: int, clock: int, square: float) -> list[tuple[NormRequest, float]]:
        """Record the squared norm of a gathered round. Return the requests that this answers, with the answers."""
        self._squares[group, lane, clock] = square
        answered = []
        for request in list(self._waiting.get(group, ())):
            if (square_of_all := self._answer(group, request)) is not None:
                answered.append((request, square_of_all))
        return answered

    def released(self, group: int, lane: int, clock: int) -> list[NormRequest]:
        """Forget a round that is applied. Return the requests that can therefore never be answered."""
        self._squares.pop((group, lane, clock), None)
        waiting = self._waiting.get(group, [])
        lost = [request for request in waiting if lane in request.lanes and request.clock <= clock]
        for request in lost:
            waiting.remove(request)
        return lost

    def unite(self, lanes: Iterable[int], lane: int) -> None:
        """Let one lane replace lanes without pushes. A request may have arrived before the first push of its keys."""
        replaced = set(lanes)
        for request in (one for requests in self._waiting.values() for one in requests):
            request.lanes = list(dict.fromkeys(lane if old in replaced else old for old in request.lanes))

    def split(self, lane: int, parts: Sequence[int]) -> None:
        """Replace a lane by its parts. The first part takes over the squared norm of the whole."""
        for group, _, clock in [position for position in self._squares if position[1] == lane]:
            square = self._squares.pop((group, lane, clock))
            self._squares |= {(group, part, clock): 0.0 for part in parts}
            self._squares[group, parts[0], clock] = square
        for request in (one for requests in self._waiting.values() for one in requests):
            if lane in request.lanes:
                at = request.lanes.index(lane)
                request.lanes[at : at + 1] = parts

    def remove(self, worker: int) -> None:
        """Drop the requests of a worker that left."""
        for group, requests in self._waiting.items():
            self._waiting[group] = [request for request in requests if request.worker != worker]

    def know(self, group: int, keys: Sequence[int], clock: int, square: float) -> None:
        """Record the norm of a round that was answered before, unless a later one is known."""
        known = self._known.get((group, tuple(keys)))
        if known is None or known.clock < clock:
            self._known[group, tuple(keys)] = _Known(clock, square)

    def to_plain(self) -> list[list[Any]]:
        """Return the last answers as numbers and lists."""
        return [[group, list(keys), *known] for (group, keys), known in self._known.items()]

    def load_plain(self, plain: list[list[Any]]) -> None:
        """Take over what `to_plain` returned."""
        self._known = {(group, tuple(keys)): _Known(clock, square) for group, keys, clock, square in plain}

    def forget_requests(self) -> None:
        """Drop all requests that wait; they will be sent again. The norms that are known stay."""
        self._waiting.clear()

    def forget(self, group: int) -> None:
        """Forget the rounds of a group whose last worker left."""
        self._waiting.pop(group, None)
        self._squares = {position: square for position, square in self._squares.items() if position[0] != group}
        self._known = {place: known for place, known in self._known.items() if place[0] != group}

    def _answer(self, group: int, request: NormRequest) -> float | None:
        squares = [self._squares.get((group, lane, request.clock)) for lane in request.lanes]
        if any(square is None for square in squares):
            return None
        known = self._known.get((group, request.keys))
        if known is None or known.clock != request.clock:
            known = _Known(request.clock, sum(square for square in squares if square is not None))
            self._known[group, request.keys] = known
            if len(self._known) > MAX_KNOWN:
                del self._known[next(iter(self._known))]  # the oldest list of keys
        self._waiting[group].remove(request)
        return known.square
