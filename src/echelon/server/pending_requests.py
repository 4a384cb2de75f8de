"""The pushes and pulls that a server has not answered yet.

For each request the engine decides what happens, `execute` carries it out, and the answer is sent when all keys of the
request are done; the engine may decide the keys of one request at different times. A repeated request does no harm: the
engine applies each (worker, lane, clock) once, and a lost answer is sent again with the present weights.

Gated rounds are applied in two stages. When a round is gathered, the squared norm of its sum is computed at once, while
workers still compute their other gradients. `measure_norm` answers when all lanes of the request are gathered, and
`apply_scaled` applies them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from echelon.cluster.messages import Done, Failed, Response, SquaredNorm
from echelon.errors import UsageError
from echelon.schemes import Apply, Decision, Engine, Gathered, NormRequest, Norms, Reply, scale_to_clip
from echelon.schemes.engine import APPLIED
from echelon.schemes.norms import DIFFERENT_KEYS
from echelon.server.arrivals import Arrivals
from echelon.server.execute import Storage, Task
from echelon.server.lanes import Lanes
from echelon.server.memory import Framed, Window
from echelon.server.optimizer.optimization import Optimization, PushedGradient, shares_of
from echelon.server.rows import PushedRows
from echelon.server.tables import RowOutput
from echelon.transport.outbox import Precedence

DESCRIBE_S = 0.5  # how often a decision is described for the event log
MAX_AHEAD = 128  # rounds that a worker may push before the first of them is applied
MAX_PENDING = 1 << 17  # requests of a worker without an answer
MAX_HELD_BYTES = 4 << 30  # of the frames of these requests and their answers, or eight times the store if that is more
_Position = tuple[int, int, int]  # worker, lane, clock


class Answer(Protocol):
    """Sends a response to a worker."""

    def __call__(
        self, worker: int, response: Response, frames: Sequence[memoryview], precedence: Precedence | None = None, /
    ) -> None: ...


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
    version: int = 0
    staleness: int = 0
    rounds_ahead: int = 0
    notice: str = ""


class PendingRequests:
    """The pending requests of all workers. `answer(worker, response, frames)` sends."""

    def __init__(
        self,
        engine: Engine,
        storage: Storage,
        optimization: Optimization,
        answer: Answer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self._clock = clock
        self.lanes = Lanes(engine, self._unite, self._split)
        self._storage = storage
        self._optimization = optimization
        self._answer = answer
        self.damage = ""  # why an update failed half-way: the values of the store are not right any more
        self._pending: dict[int, dict[int, PendingRequest]] = {}  # worker -> request id -> request
        self._held_bytes: dict[int, int] = {}  # worker -> of its pending requests
        self._gradients: dict[_Position, PushedGradient] = {}  # pushed and not applied
        self._pulls: dict[_Position, list[PendingRequest]] = {}  # requests that wait for weights
        self._pushes: dict[int, list[PendingRequest]] = {}  # lane -> pushes that do not ask for weights
        self._norms = Norms()
        self._halt_clock: int | None = None  # the first clock whose push asked all workers to stop
        self.arrivals = Arrivals(engine.rules.group_of)
        self.num_pushes = self.num_updates = 0
        self.decision = ""  # a recent decision of the scheme, with its reason
        self._described_at = 0.0

    def find(self, worker: int, request: int) -> PendingRequest | None:
        """Return a pending request, or None if it never arrived or has been answered."""
        return self._pending.get(worker, {}).get(request)

    @property
    def holds_gradients(self) -> bool:
        """Whether a push waits for its round."""
        return bool(self._gradients)

    def push(
        self,
        worker: int,
        request: int,
        keys: Sequence[int],
        clock: int,
        gradient: PushedGradient,
        output: Window | RowOutput | None,
        priority: int = 0,
    ) -> None:
        """Add a push. `output` is where the new weights go; None if the worker does not want them."""
        if self.find(worker, request) is not None:
            return  # it was sent twice
        header = gradient.header
        lanes = self.lanes.resolve(keys, pushed=True)
        size = _num_bytes(gradient.window) + _num_bytes(output)
        self._check_room(worker, lanes, clock, size)
        if header.halt:
            self.halt_after(clock)
        precedence, now = Precedence(priority, keys), self._clock()
        self.num_pushes += 1
        self.arrivals.pushed(worker, clock, now)
        pending = self._add(
            PendingRequest(worker, request, clock + 1, set(lanes), output, size, precedence, now), lanes
        )
        decisions: list[Decision] = []
        for lane in lanes:
            self._gradients.setdefault((worker, lane, clock), gradient)
            arrived = self.engine.push(worker, lane, clock, header.samples, header.absent, gated=header.gated)
            decisions.append(arrived)
            if output is not None:
                decisions.append(self.engine.pull(worker, lane, clock + 1))
            else:
                self._pushes.setdefault(lane, []).append(pending)
        if now - self._described_at >= DESCRIBE_S:
            self._described_at = now
            self.decision = self._describe(worker, lanes[-1], clock + 1, decisions[-1])
        self._carry_out(decisions)
        for lane in lanes:
            if self.engine.clock(worker, lane) > clock:  # it carried no gradient, or was applied before
                self._gradients.pop((worker, lane, clock), None)
            self._answer_applied_pushes(lane)

    def halt_after(self, clock: int) -> None:
        """Tell workers to stop in the answers to pushes of this clock and of later ones.

        Where a round waits for all workers, all get the answers of the same clock, so they stop at the same clock.
        """
        self._halt_clock = clock if self._halt_clock is None else min(self._halt_clock, clock)

    def pull(
        self,
        worker: int,
        request: int,
        keys: Sequence[int],
        clock: int,
        output: Window | RowOutput,
        priority: int = 0,
    ) -> None:
        """Add a pull; the weights go to `output`."""
        if self.find(worker, request) is not None:
            return  # it was sent twice
        lanes = self.lanes.resolve(keys, pushed=False)
        size, precedence = _num_bytes(output), Precedence(priority, keys)
        self._check_room(worker, lanes, clock - 1, size)
        self._add(PendingRequest(worker, request, clock, set(lanes), output, size, precedence, self._clock()), lanes)
        self._carry_out([self.engine.pull(worker, lane, clock) for lane in lanes])

    def measure_norm(self, worker: int, request: int, keys: Sequence[int], clock: int, max_norm: float | None) -> None:
        """Answer with the squared norm of a round when it is gathered. With `max_norm`, apply it then, clipped."""
        lanes = self.lanes.resolve(keys, pushed=False)
        self._check_room(worker, lanes, clock, 0)
        asked = NormRequest(worker, request, tuple(keys), clock, max_norm, list(lanes))
        group = self.engine.rules.group_of(worker)
        square = self._norms.ask(group, asked, [self.engine.clock(worker, lane) for lane in lanes])
        if square is not None:
            self._answer_norms([(asked, square)])

    def apply_scaled(self, worker: int, keys: Sequence[int], clock: int, scale: float) -> None:
        """Apply a gathered round with the sum of its gradients times `scale`, unless it is applied already."""
        lanes = self.lanes.resolve(keys, pushed=False)
        decisions = [self.engine.release(worker, lane, clock, scale) for lane in lanes]
        self._carry_out(decisions)
        for lane, decision in zip(lanes, decisions, strict=True):
            if decision.reason == APPLIED:
                for lost in self._norms.released(self.engine.rules.group_of(worker), lane, clock):
                    self._answer(lost.worker, Failed(lost.id, DIFFERENT_KEYS), ())
                self._answer_applied_pushes(lane)

    def waiting_norm(self, worker: int, request: int) -> tuple[int, int] | None:
        """Return a lane and the clock that a request for a norm waits for, or None if there is no such request."""
        asked = self._norms.find(worker, request)
        if asked is None:
            return None
        return self._norms.first_missing(self.engine.rules.group_of(worker), asked), asked.clock + 1

    @property
    def num_held(self) -> int:
        """The requests without an answer."""
        return sum(map(len, self._pending.values()))

    def _describe(self, worker: int, lane: int, clock: int, decision: Decision) -> str:
        """Return a decision that was not carried out yet, with its reason and the workers that it waits for."""
        missing = self.engine.missing(worker, lane, clock)
        waits_for = f" (worker {', '.join(map(str, missing))})" if missing else ""
        return f"worker {worker}, clock {clock}: {decision.reason}{waits_for}"

    def retire(self, worker: int) -> str:
        """Stop waiting for a worker that has finished and may still pull. Return the engine's reason."""
        reason = self._carry_out_departure(self.engine.leave(worker, finished=True))
        self._answer_pulls(worker)
        return reason

    def pause(self, worker: int) -> None:
        """Stop waiting for a worker until it resumes."""
        self._carry_out_departure(self.engine.pause(worker))
        self._answer_pulls(worker)

    def resume(self, worker: int) -> dict[int, int]:
        """Let a paused worker take part again. Return the clock of its next push of each key."""
        self.engine.resume(worker)
        return {key: self.engine.clock(worker, self.lanes.lane_of(key)) for key in self.lanes.all()}

    def remove(self, worker: int) -> str:
        """Drop the requests of a worker that left the job, and stop waiting for it. Return the engine's reason."""
        self._pending.pop(worker, None)
        self.arrivals.remove(worker)
        self._held_bytes.pop(worker, None)
        self._norms.remove(worker)
        for position in [position for position in self._pulls if position[0] == worker]:
            del self._pulls[position]
        for lane, waiting in self._pushes.items():
            self._pushes[lane] = [pending for pending in waiting if pending.worker != worker]
        reason = self._carry_out_departure(self.engine.leave(worker))
        if not self.engine.group_is_active(worker):  # the engine dropped the incomplete rounds of the group
            for position in [position for position in self._gradients if position[0] == worker]:
                del self._gradients[position]
            self._norms.forget(self.engine.rules.group_of(worker))
        return reason

    def _answer_pulls(self, worker: int) -> None:
        """Answer the pulls of a worker that does not take part any more: the engine has stopped waiting for them."""
        held = [pending for pending in self._pending.get(worker, {}).values() if pending.output is not None]
        self._carry_out([self.engine.pull(worker, lane, one.clock) for one in held for lane in sorted(one.waiting)])

    def _carry_out_departure(self, decision: Decision) -> str:
        self._carry_out([decision])
        for lane in list(self._pushes):
            self._answer_applied_pushes(lane)
        return decision.reason

    def _check_room(self, worker: int, lanes: Sequence[int], clock: int, num_bytes: int) -> None:
        """Raise UsageError if a worker is too far ahead of its group, or has too many requests without an answer."""
        applied = min(self.engine.clock(worker, lane) for lane in lanes)
        if clock - applied > MAX_AHEAD:
            raise UsageError(
                f"worker {worker} is at clock {clock} of a key of which {applied} rounds are applied; it may be at "
                f"most {MAX_AHEAD} rounds ahead"
            )
        count, held = len(self._pending.get(worker, ())), self._held_bytes.get(worker, 0) + num_bytes
        if count >= MAX_PENDING or (held > MAX_HELD_BYTES and held > 8 * self._storage.num_bytes):
            raise UsageError(
                f"worker {worker} has {count} requests without an answer, with {held / 1e6:.0f} MB; wait for answers "
                "before you send more"
            )

    def _add(self, pending: PendingRequest, lanes: Sequence[int]) -> PendingRequest:
        self._pending.setdefault(pending.worker, {})[pending.id] = pending
        self._held_bytes[pending.worker] = self._held_bytes.get(pending.worker, 0) + pending.num_bytes
        if pending.output is not None:
            for lane in lanes:
                self._pulls.setdefault((pending.worker, lane, pending.clock), []).append(pending)
        return pending

    def _take(self, worker: int, request: int) -> PendingRequest | None:
        """Remove a request to answer it, and return it."""
        pending = self._pending.get(worker, {}).pop(request, None)
        if pending is not None:
            self._held_bytes[worker] -= pending.num_bytes
        return pending

    def _carry_out(self, decisions: Sequence[Decision]) -> None:
        """Run the updates and copies of decisions. If one fails, later requests of the store are rejected."""
        try:
            self._run(decisions)
        except Exception as error:
            self.damage = self.damage or repr(error)
            raise

    def _run(self, decisions: Sequence[Decision]) -> None:
        """Run the updates and copies of decisions; an update and the answers that follow it share one pass."""
        tasks: list[Task] = []
        norms: list[tuple[NormRequest, float]] = []
        answers: list[tuple[PendingRequest, Reply]] = []
        last: list[Task] = []  # of lane `at`: its update, if there is one, and the outputs for its weights
        at: int | None = None
        for action in itertools.chain.from_iterable(decision.actions for decision in decisions):
            if isinstance(action, Gathered):
                norms += self._measure(action)
                continue
            if action.key != at or isinstance(action, Apply):
                tasks += last
                last, at = [], action.key
            last = self._updates(action) if isinstance(action, Apply) else self._with_outputs(action, last, answers)
        self._storage.run([*tasks, *last])
        for pending, reply in answers:
            pending.version = reply.version
            rounds = self.engine.rounds_ahead(reply.worker, reply.key, reply.clock)
            pending.rounds_ahead = max(pending.rounds_ahead, rounds)
            self._finish_lane(pending, reply.key)
        self._answer_norms(norms)

    def _measure(self, action: Gathered) -> list[tuple[NormRequest, float]]:
        """Compute the squared norm of a gathered round. Return the requests for norms that this answers."""
        lane, clock = action.key, action.clock
        pushed = [self._gradients[part.worker, lane, clock].window for part in action.contributions]
        square = self._storage.squared_norm(self.lanes.keys(lane), pushed, shares_of(action))
        return self._norms.gathered(action.group, lane, clock, square)

    def _answer_norms(self, answered: Sequence[tuple[NormRequest, float]]) -> None:
        for asked, square in answered:
            self._answer(asked.worker, SquaredNorm(asked.id, square), ())
        for asked, square in answered:
            if asked.max_norm is not None:
                self.apply_scaled(asked.worker, asked.keys, asked.clock, scale_to_clip(square, asked.max_norm))

    def _updates(self, action: Apply) -> list[Task]:
        self.num_updates += 1
        gradients = [self._gradients.pop((part.worker, action.key, action.clock)) for part in action.contributions]
        notice = self._optimization.disagreement([part.worker for part in action.contributions], gradients)
        for part in action.contributions:
            for pending in self._pulls.get((part.worker, action.key, action.clock + 1), ()):
                pending.staleness = max(pending.staleness, part.staleness)
                pending.notice = pending.notice or notice
        if len({gradient.header.edits for gradient in gradients}) > 1:
            self._refuse(action, [part.worker for part in action.contributions])
            return []
        return self._optimization.tasks(action, self.lanes.keys(action.key), gradients)

    def _refuse(self, action: Apply, workers: Sequence[int]) -> None:
        """Answer the pushes of a round with an error, because their workers have edited the weights differently."""
        listed = ", ".join(map(str, workers))
        reason = (
            f"workers {listed} changed weights outside the optimizer, but not to the same values (did only one load a "
            "checkpoint or re-initialise a layer?); make the same change on all workers, or put it into "
            "'with trainer.edit_weights():', where the values of the lowest rank count"
        )
        for worker in workers:
            for pending in self._pulls.pop((worker, action.key, action.clock + 1), ()):
                if self._take(worker, pending.id) is not None:
                    self._answer(worker, Failed(pending.id, reason), ())

    def _with_outputs(self, reply: Reply, tasks: list[Task], answers: list[tuple[PendingRequest, Reply]]) -> list[Task]:
        """Add the outputs of answered pulls to the lane's update, or to a new copy task if there is no update."""
        for pending in self._pulls.pop((reply.worker, reply.key, reply.clock), ()):
            assert pending.output is not None
            answers.append((pending, reply))
            if isinstance(pending.output, RowOutput):
                continue  # its rows are read when the answer is sent
            tasks = tasks or [Task(self.lanes.keys(reply.key), None, ())]
            if pending.output not in tasks[0].outputs:
                tasks = [Task(keys, update, (*outputs, pending.output)) for keys, update, outputs in tasks]
        return tasks

    def _answer_applied_pushes(self, lane: int) -> None:
        """Answer the pushes that do not ask for weights and whose gradient has been applied."""
        waiting = self._pushes.pop(lane, ())
        done = [pending for pending in waiting if self.engine.clock(pending.worker, lane) >= pending.clock]
        if rest := [pending for pending in waiting if pending not in done]:
            self._pushes[lane] = rest
        for pending in done:
            self._finish_lane(pending, lane)

    def _finish_lane(self, pending: PendingRequest, lane: int) -> None:
        """Mark one lane of a request as done, and answer the request once when it was the last lane."""
        pending.waiting.discard(lane)
        if not pending.waiting and self._take(pending.worker, pending.id) is not None:
            frames = pending.output.buffers() if isinstance(pending.output, Framed | RowOutput) else ()
            halt = self._halt_clock is not None and self._halt_clock < pending.clock
            now = self._clock()
            self.arrivals.answered(pending.worker, now)
            done = Done(
                pending.id,
                pending.version,
                pending.staleness,
                halt,
                pending.rounds_ahead,
                pending.notice,
                now - pending.arrived_at,
            )
            self._answer(pending.worker, done, frames, pending.precedence)

    def _unite(self, keys: tuple[int, ...], lane: int) -> bool:
        if not self._optimization.unite(keys, lane):
            return False
        self._norms.unite(keys, lane)
        return True

    def _split(self, lane: int, parts: tuple[int, ...]) -> None:
        """Replace a lane by its parts in everything that is recorded for it."""
        self._optimization.split(lane, parts)
        self._norms.split(lane, parts)
        for worker, _, clock in [position for position in self._gradients if position[1] == lane]:
            gradient = self._gradients.pop((worker, lane, clock))
            self._gradients |= {(worker, part, clock): gradient for part in parts}
        for worker, _, clock in [position for position in self._pulls if position[1] == lane]:
            pulls = self._pulls.pop((worker, lane, clock))
            self._pulls |= {(worker, part, clock): list(pulls) for part in parts}
        if pushes := self._pushes.pop(lane, None):
            self._pushes |= {part: list(pushes) for part in parts}
        for pending in itertools.chain.from_iterable(requests.values() for requests in self._pending.values()):
            if lane in pending.waiting:
                pending.waiting.remove(lane)
                pending.waiting.update(parts)


def _num_bytes(memory: Window | PushedRows | RowOutput | None) -> int:
    """Return the bytes that a request or its answer keeps in this process."""
    return memory.num_bytes if isinstance(memory, Framed | PushedRows) else 0
