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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from echelon.cluster.messages import Contents, Done, Failed, SquaredNorm
from echelon.errors import UsageError
from echelon.fault_points import fault_point
from echelon.observe.history import ShardHistory
from echelon.schemes import Apply, Decision, Engine, Gathered, NormRequest, Norms, Reply, scale_to_clip
from echelon.schemes.engine import APPLIED, DUPLICATE, JOINED
from echelon.schemes.norms import DIFFERENT_KEYS
from echelon.server.shard.activity import Activity
from echelon.server.shard.answer import Answer
from echelon.server.shard.resuming import Resuming
from echelon.server.shard.room import Need
from echelon.server.shard.waiting_requests import PendingRequest, WaitingRequests, kept_bytes
from echelon.server.shard.work import AppliedWork
from echelon.server.storage.execute import Storage, Task
from echelon.server.storage.lanes import Lanes
from echelon.server.storage.memory import Framed, Mapped, Window
from echelon.server.storage.optimization import Optimization, PushedGradient, shares_of
from echelon.server.storage.tables import RowOutput
from echelon.server.storage.write_log import WriteLog, Written
from echelon.transport.outbox import Precedence

MAX_AHEAD = 128  # rounds that a worker may push before the first of them is applied
_Position = tuple[int, int, int]  # worker, lane, clock


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
        self.is_passive = False  # of a backup: the same decisions and updates, but no requests that wait for answers
        self.damage = ""  # why an update failed half-way: the values of the store are not right any more
        self.waiting = WaitingRequests()
        self._gradients: dict[_Position, PushedGradient] = {}  # pushed and not applied
        self._num_empty = 0  # pushes without a gradient that may wait: no update removes them
        self.resuming = Resuming(engine, self.lanes, answer)
        self._norms = Norms()
        self._halt_clock: int | None = None  # the first clock whose push asked all workers to stop
        self.activity = Activity(engine)
        self.work = AppliedWork(engine, self.lanes, self._num_trained_keys)
        self.history: ShardHistory | None = None  # set if it is recorded

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
        fault_point("server.push", clock)
        if self.waiting.find(worker, request) is not None:
            return  # it was sent twice
        header = gradient.header
        lanes = self.lanes.resolve(keys, pushed=True)
        size = kept_bytes(gradient.window) + kept_bytes(output)
        self._check_room(worker, lanes, clock, size)
        if header.halt:
            self.halt_after(clock)
        precedence, now = Precedence(priority, keys), self._clock()
        self.activity.pushed(worker, clock, now)
        pending = self._add(
            PendingRequest(worker, request, clock + 1, set(lanes), output, size, precedence, now), lanes
        )
        decisions: list[Decision] = []
        is_new = False
        for lane in lanes:
            self._gradients.setdefault((worker, lane, clock), gradient)
            arrived = self.engine.push(worker, lane, clock, header.samples, header.absent, gated=header.gated)
            decisions.append(arrived)
            is_new = is_new or arrived.reason != DUPLICATE
            if output is not None:
                decisions.append(self.engine.pull(worker, lane, clock + 1))
            elif not self.is_passive:
                self.waiting.pushes.setdefault(lane, []).append(pending)
        if header.work and is_new:
            self.work.record(worker, clock, keys, header.work)
        self.activity.describe_if_due(worker, lanes[-1], clock + 1, decisions[-1], now)
        self._carry_out(decisions)
        self._num_empty += header.samples == 0
        for lane in lanes:
            if self.engine.clock(worker, lane) > clock:  # it was applied before
                self._gradients.pop((worker, lane, clock), None)
            self._answer_applied_pushes(lane)
        if self._num_empty:
            self._drop_empty()

    def _drop_empty(self) -> None:
        """Drop the pushes without a gradient whose rounds are applied."""
        empty = [position for position, one in self._gradients.items() if one.header.samples == 0]
        applied = [position for position in empty if self.engine.clock(*position[:2]) > position[2]]
        for position in applied:
            del self._gradients[position]
        self._num_empty = len(empty) - len(applied)

    def need_for(self, worker: int, keys: Sequence[int], clock: int) -> Need:
        """Return whether something on this server goes on with a push of a worker, or with a later one."""
        lanes = {self.lanes.lane_of(key) for key in keys}
        for lane in lanes:
            missing = self.engine.missing(worker, lane, self.engine.clock(worker, lane) + 1)
            if self.engine.clock(worker, lane) >= clock and not missing.keys() - {worker}:
                return Need.THIS  # it completes a round
        need = Need.NONE
        for pending in self.waiting.of_others(worker):
            for lane in pending.waiting:
                missing = self.engine.missing(pending.worker, lane, pending.clock)
                if lane in lanes and missing.get(worker, -1) >= clock:
                    return Need.THIS
                if not missing or worker in missing:  # without anybody missing, it waits for its release
                    need = Need.LATER
        return need

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
        if self.waiting.find(worker, request) is not None:
            return  # it was sent twice
        lanes = self.lanes.resolve(keys, pushed=False)
        size, precedence = kept_bytes(output), Precedence(priority, keys)
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

    def retire(self, worker: int) -> str:
        """Stop waiting for a worker that has finished and may still pull. Return the engine's reason."""
        reason = self._carry_out_departure(worker, self.engine.leave(worker, finished=True))
        self._answer_pulls(worker)
        return reason

    def pause(self, worker: int) -> None:
        """Stop waiting for a worker until it resumes or joins."""
        self._carry_out_departure(worker, self.engine.pause(worker))
        self._answer_pulls(worker)

    def next_clocks(self, worker: int) -> dict[int, int]:
        """Return for each key the clock from which on a worker may join."""
        clocks = self.engine.next_clocks(worker)
        return {key: clocks[self.lanes.lane_of(key)] for key in self.lanes.all()}

    def join(self, worker: int, first: int, firsts: Mapping[int, int]) -> bool:
        """Let a worker take part from these clocks on. Return False if one is not free any more."""
        by_lane = {self.lanes.lane_of(key): clock for key, clock in firsts.items() if key in self.lanes}
        decision = self.engine.join(worker, first, by_lane)
        self._carry_out_change(decision)
        self.resuming.answer_complete()
        return decision.reason == JOINED

    def remove(self, worker: int, view: int = 0) -> str:
        """Drop the requests of a worker that left the job, and stop waiting for it. Return the engine's reason.

        `view` is the one in which it left.
        """
        self.waiting.remove(worker)
        self.activity.remove(worker)
        self._norms.remove(worker)
        self.resuming.remove(worker)
        self.work.leave(worker, view)
        reason = self._carry_out_departure(worker, self.engine.leave(worker))
        self.resuming.answer_complete()
        return reason

    def _settle(self) -> None:
        """Settle the samples of workers that have left, if none of their gradients waits any more."""
        for worker in self.work.settle() if self.work.is_settling else ():
            self.engine.drop_rounds(worker)  # all others of its group wait for their next samples
            self._drop_gradients(self.engine.rules.group_of(worker))
            self.work.abandon(worker)

    def _num_trained_keys(self) -> int:
        return self._optimization.num_trained(self.lanes.all())

    def _answer_pulls(self, worker: int) -> None:
        """Answer the pulls of a worker that does not take part any more: the engine has stopped waiting for them."""
        held = [pending for pending in self.waiting.of_worker(worker) if pending.output is not None]
        self._carry_out([self.engine.pull(worker, lane, one.clock) for one in held for lane in sorted(one.waiting)])

    def _carry_out_departure(self, worker: int, decision: Decision) -> str:
        self._carry_out_change(decision)
        if self.engine.group_is_over(worker):  # the engine dropped the incomplete rounds of the group
            self._drop_gradients(self.engine.rules.group_of(worker))
        return decision.reason

    def _drop_gradients(self, group: int) -> None:
        for position in [one for one in self._gradients if self.engine.rules.group_of(one[0]) == group]:
            del self._gradients[position]
        self._norms.forget(group)

    def _carry_out_change(self, decision: Decision) -> None:
        """Carry out what a change of the workers causes."""
        self._carry_out([decision])
        for lane in list(self.waiting.pushes):
            self._answer_applied_pushes(lane)

    def _check_room(self, worker: int, lanes: Sequence[int], clock: int, num_bytes: int) -> None:
        """Raise UsageError if a worker is too far ahead of its group, or has too many requests without an answer."""
        applied = min(self.engine.clock(worker, lane) for lane in lanes)
        if clock - applied > MAX_AHEAD:
            raise UsageError(
                f"worker {worker} is at clock {clock} of a key of which {applied} rounds are applied; it may be at "
                f"most {MAX_AHEAD} rounds ahead"
            )
        self.waiting.check_room(worker, num_bytes, self._storage.num_bytes)

    def know_norm(self, worker: int, clock: int, keys: Sequence[int], square: float) -> None:
        """Take over the norm of a round from a worker that was told it. The other workers of its group may ask."""
        self._norms.know(self.engine.rules.group_of(worker), keys, clock, square)

    def to_plain(self) -> dict[str, Any]:
        """Return the state as numbers, lists and dicts, without gradients and requests that wait."""
        return {
            "engine": self.engine.to_plain(),
            "lanes": self.lanes.to_plain(),
            "norms": self._norms.to_plain(),
            "halt_clock": self._halt_clock,
            "resumed": self.resuming.to_plain(),
            "num_pushes": self.activity.num_pushes,
            "num_updates": self.activity.num_updates,
            "work": self.work.to_plain(),
        }

    def load_plain(self, plain: dict[str, Any]) -> None:
        """Take over what `to_plain` returned."""
        self.engine.load_plain(plain["engine"])
        self.lanes.load_plain(plain["lanes"])
        self._norms.load_plain(plain["norms"])
        self._halt_clock = plain["halt_clock"]
        self.resuming.load_plain(plain["resumed"])
        self.activity.num_pushes, self.activity.num_updates = plain["num_pushes"], plain["num_updates"]
        self.work.load_plain(plain["work"])

    def waiting_pushes(self) -> list[tuple[int, PushedGradient]]:
        """Return the pushes that wait for their round, with their workers, in the order of their arrival."""
        found = {id(one): (position[0], one) for position, one in self._gradients.items()}
        return list(found.values())

    def copy_gradients(self, worker: int, copied: Callable[[PushedGradient], PushedGradient]) -> None:
        """Replace the gradients of a worker that leaves by copies, because it may write to its memory again."""
        mine = {position: one for position, one in self._gradients.items() if position[0] == worker}
        copies = {id(one): copied(one) for one in mine.values()}
        self._gradients |= {position: copies[id(one)] for position, one in mine.items()}

    def put_back(self, worker: int, gradient: PushedGradient) -> None:
        """Let the push of a worker that does not take part any more wait for its round, as it does on the primary."""
        assert gradient.push is not None
        header, clock = gradient.header, gradient.push.clock
        for lane in self.lanes.resolve(gradient.push.keys, pushed=True):
            if self.engine.put_back(worker, lane, clock, header.samples, header.absent, gated=header.gated):
                self._gradients[worker, lane, clock] = gradient
        self._num_empty += header.samples == 0

    def promote(self) -> None:
        """Keep requests until they are answered, from now on. Workers repeat those that the old primary had."""
        self.is_passive = False
        self._norms.forget_requests()
        self.engine.forget_pulls()

    def _add(self, pending: PendingRequest, lanes: Sequence[int]) -> PendingRequest:
        if not self.is_passive:
            self.waiting.add(pending, lanes)
        return pending

    def _carry_out(self, decisions: Sequence[Decision]) -> None:
        """Run the updates and copies of decisions. If one fails, later requests of the store are rejected."""
        try:
            self._run(decisions)
            self._settle()
        except Exception as error:
            self.damage = self.damage or repr(error)
            raise

    def _run(self, decisions: Sequence[Decision]) -> None:
        """Run the updates and copies of decisions; an update and the answers that follow it share one pass."""
        tasks: list[Task] = []
        norms: list[tuple[NormRequest, float]] = []
        answers: list[tuple[PendingRequest, Reply]] = []
        contents: list[Contents] = []  # of each answer
        last: list[Task] = []  # of lane `at`: its update, if there is one, and the outputs for its weights
        at: int | None = None
        applied: dict[int, None] = {}  # the clocks of these updates
        for action in itertools.chain.from_iterable(decision.actions for decision in decisions):
            if isinstance(action, Gathered):
                norms += self._measure(action)
                continue
            if action.key != at or isinstance(action, Apply):
                tasks += last
                last, at = [], action.key
            if isinstance(action, Apply):
                applied[action.clock] = None
            last = self._updates(action) if isinstance(action, Apply) else self._with_outputs(action, last, answers)
        for _, reply in answers:
            # The updates of a lane come before its replies, so the engine is where this reply was decided.
            contents.append(Contents(reply.version, self.engine.clocks(reply.key), list(self.lanes.keys(reply.key))))
        logs = _note(answers, contents)
        self._storage.run([*tasks, *last])
        if self.history is not None:
            replies = [(self.lanes.keys(reply.key), reply) for _, reply in answers]
            self.history.flush(self.engine, replies, self._storage.digest)
        for log in logs:
            log.end()
        for clock in applied:
            fault_point("server.applied", clock)
        for (pending, reply), has in zip(answers, contents, strict=True):
            pending.contents.append(has)
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
        self.activity.num_updates += 1
        gradients = [self._gradients.pop((part.worker, action.key, action.clock)) for part in action.contributions]
        notice = self._optimization.disagreement([part.worker for part in action.contributions], gradients)
        for part in action.contributions:
            for pending in self.waiting.pulls.get((part.worker, action.key, action.clock + 1), ()):
                pending.staleness = max(pending.staleness, part.staleness)
                pending.notice = pending.notice or notice
        if len({gradient.header.edits for gradient in gradients}) > 1:
            self._refuse(action, [part.worker for part in action.contributions])
            return []
        if self.history is not None:
            works = [gradient.header.work for gradient in gradients]
            self.history.updated(self.lanes.keys(action.key), action, works)
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
            for pending in self.waiting.pulls.pop((worker, action.key, action.clock + 1), ()):
                if self.waiting.take(worker, pending.id) is not None:
                    self._answer(worker, Failed(pending.id, reason), ())

    def _with_outputs(self, reply: Reply, tasks: list[Task], answers: list[tuple[PendingRequest, Reply]]) -> list[Task]:
        """Add the outputs of answered pulls to the lane's update, or to a new copy task if there is no update."""
        for pending in self.waiting.pulls.pop((reply.worker, reply.key, reply.clock), ()):
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
        waiting = self.waiting.pushes.pop(lane, ())
        done = [pending for pending in waiting if self.engine.clock(pending.worker, lane) >= pending.clock]
        if rest := [pending for pending in waiting if pending not in done]:
            self.waiting.pushes[lane] = rest
        for pending in done:
            self._finish_lane(pending, lane)

    def _finish_lane(self, pending: PendingRequest, lane: int) -> None:
        """Mark one lane of a request as done, and answer the request once when it was the last lane."""
        pending.waiting.discard(lane)
        if not pending.waiting and self.waiting.take(pending.worker, pending.id) is not None:
            frames = pending.output.buffers() if isinstance(pending.output, Framed | RowOutput) else ()
            halt = self._halt_clock is not None and self._halt_clock < pending.clock
            now = self._clock()
            self.activity.answered(pending.worker, now)
            contents = _joint(pending.contents)
            done = Done(
                pending.id,
                contents[-1].version if contents else 0,
                pending.staleness,
                halt,
                pending.rounds_ahead,
                pending.notice,
                now - pending.arrived_at,
                contents,
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
        self.waiting.split(lane, parts)


def _note(answers: Sequence[tuple[PendingRequest, Reply]], contents: Sequence[Contents]) -> list[WriteLog]:
    """Note in the memory of workers which weights will be written there. Return the notes to end."""
    parts: dict[tuple[WriteLog, PendingRequest], list[Contents]] = {}
    for (pending, _), has in zip(answers, contents, strict=True):
        if isinstance(pending.output, Mapped) and pending.output.log is not None:
            parts.setdefault((pending.output.log, pending), []).append(has)
    by_log: dict[WriteLog, list[Written]] = {}
    for (log, pending), of_lanes in parts.items():
        is_whole = not pending.contents and len(of_lanes) == len(pending.waiting)
        by_log.setdefault(log, []).append(Written(pending.id, _joint(of_lanes) if is_whole else of_lanes))
    for log, of_log in by_log.items():
        log.begin(of_log)
    return list(by_log)


def _joint(contents: list[Contents]) -> list[Contents]:
    """Return what the weights of an answer contain: once, without keys, if it is the same for all its lanes."""
    if all(one.version == contents[0].version and one.clocks == contents[0].clocks for one in contents):
        return [Contents(one.version, one.clocks) for one in contents[:1]]
    return contents
