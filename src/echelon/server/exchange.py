"""Pushes and pulls on a server: ask the engine, carry its decisions out, answer when the last key of a request is done.

A request may name many keys, and its keys may be decided at different times; it is answered when the last one is.
Repeating a request is harmless: the engine applies each (worker, lane, clock) once, and an answer that was lost is
given again with the weights as they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from echelon.cluster.messages import Done
from echelon.schemes import Apply, Decision, Engine, Reply
from echelon.server.execute import Store, Task
from echelon.server.lanes import Lanes
from echelon.server.memory import Framed, Window
from echelon.server.optimization import Optimization, Pushed

Finished = Callable[[int, Done, Sequence[memoryview]], None]
_Place = tuple[int, int, int]  # worker, lane, clock


@dataclass(slots=True, eq=False)
class Opened:
    """A request that is not answered yet."""

    worker: int
    id: int
    clock: int  # of the pull; a push of clock c pulls at c + 1
    waiting: set[int]  # lanes
    output: Window | None  # None: a push that only wants to know that it was applied
    version: int = 0
    staleness: int = 0


class Exchange:
    """The requests under way, from the first push on."""

    def __init__(self, engine: Engine, store: Store, optimization: Optimization, finished: Finished) -> None:
        self.engine = engine
        self.lanes = Lanes(engine, optimization.unite, self._split)
        self._store = store
        self._optimization = optimization
        self._finished = finished
        self._open: dict[int, dict[int, Opened]] = {}  # worker -> request id -> request
        self._pushed: dict[_Place, Pushed] = {}
        self._expected: dict[_Place, list[Opened]] = {}  # pulls that wait
        self._unapplied: dict[int, list[Opened]] = {}  # lane -> pushes without a pull that wait
        self._halt_clock: int | None = None  # the first push with which somebody asked all to stop

    def opened(self, worker: int, request: int) -> Opened | None:
        """A request under way, if it is."""
        return self._open.get(worker, {}).get(request)

    def push(
        self, worker: int, request: int, keys: Sequence[int], clock: int, pushed: Pushed, output: Window | None
    ) -> None:
        """A gradient is there; `output`: where its worker wants the weights, None if it only pushes."""
        lanes = self.lanes.resolve(keys, pushed=True)
        opened = self._begin(Opened(worker, request, clock + 1, set(lanes), output), lanes)
        amount = 1.0 if pushed.samples is None else pushed.samples
        decisions: list[Decision] = []
        for lane in lanes:
            self._pushed.setdefault((worker, lane, clock), pushed)
            decisions.append(self.engine.push(worker, lane, clock, amount))
            if output is not None:
                decisions.append(self.engine.pull(worker, lane, clock + 1))
            else:
                self._unapplied.setdefault(lane, []).append(opened)
        self._act(decisions)
        for lane in lanes:
            if self.engine.clock(worker, lane) > clock:  # it had no gradient, or it had been applied before
                self._pushed.pop((worker, lane, clock), None)
            self._settle(lane)

    def ask_to_halt(self, clock: int) -> None:
        """A push of this clock asks all to stop: its answer tells them, and so does every later one.

        Where a round waits for all, all get the answers of one clock, and so they stop at one clock.
        """
        self._halt_clock = clock if self._halt_clock is None else min(self._halt_clock, clock)

    def pull(self, worker: int, request: int, keys: Sequence[int], clock: int, output: Window) -> None:
        """A worker wants weights."""
        lanes = self.lanes.resolve(keys, pushed=False)
        self._begin(Opened(worker, request, clock, set(lanes), output), lanes)
        self._act([self.engine.pull(worker, lane, clock) for lane in lanes])

    def retire(self, worker: int) -> str:
        """A worker takes no part any more; what waited for it goes on. Returns the reason."""
        decision = self.engine.leave(worker)
        self._act([decision])
        for lane in list(self._unapplied):
            self._settle(lane)
        return decision.reason

    def forget(self, worker: int) -> str:
        """A worker is gone: it is not answered any more."""
        self._open.pop(worker, None)
        for place in [place for place in self._expected if place[0] == worker]:
            del self._expected[place]
        for lane, waiting in self._unapplied.items():
            self._unapplied[lane] = [opened for opened in waiting if opened.worker != worker]
        reason = self.retire(worker)
        if not self.engine.group_lives(worker):  # its incomplete rounds went with its group
            for place in [place for place in self._pushed if place[0] == worker]:
                del self._pushed[place]
        return reason

    def _begin(self, opened: Opened, lanes: Sequence[int]) -> Opened:
        self._open.setdefault(opened.worker, {})[opened.id] = opened
        if opened.output is not None:
            for lane in lanes:
                self._expected.setdefault((opened.worker, lane, opened.clock), []).append(opened)
        return opened

    def _act(self, decisions: Sequence[Decision]) -> None:
        """Carry decisions out: an update and the answers that follow it in one go."""
        tasks: list[Task] = []
        answers: list[tuple[Opened, Reply]] = []
        last: list[Task] = []  # of the lane `at`: its update, if there was one, and who gets the weights
        at: int | None = None
        for action in itertools.chain.from_iterable(decision.actions for decision in decisions):
            if action.key != at or isinstance(action, Apply):
                tasks += last
                last, at = [], action.key
            last = self._apply(action) if isinstance(action, Apply) else self._reply(action, last, answers)
        self._store.run([*tasks, *last])
        for opened, reply in answers:
            opened.version = reply.version
            self._done(opened, reply.key)

    def _apply(self, action: Apply) -> list[Task]:
        pushes = [self._pushed.pop((part.worker, action.key, action.clock)) for part in action.contributions]
        for part in action.contributions:
            for opened in self._expected.get((part.worker, action.key, action.clock + 1), ()):
                opened.staleness = max(opened.staleness, part.staleness)
        return self._optimization.tasks(action, self.lanes.keys(action.key), pushes)

    def _reply(self, reply: Reply, tasks: list[Task], answers: list[tuple[Opened, Reply]]) -> list[Task]:
        """Let a lane's weights go to those who asked, in one go with its update if that is at hand."""
        for opened in self._expected.pop((reply.worker, reply.key, reply.clock), ()):
            assert opened.output is not None
            answers.append((opened, reply))
            tasks = tasks or [Task(self.lanes.keys(reply.key), None, ())]
            if opened.output not in tasks[0].outputs:
                tasks = [Task(keys, update, (*outputs, opened.output)) for keys, update, outputs in tasks]
        return tasks

    def _settle(self, lane: int) -> None:
        """Answer the pushes without a pull whose gradient has been applied."""
        waiting = self._unapplied.pop(lane, ())
        done = [opened for opened in waiting if self.engine.clock(opened.worker, lane) >= opened.clock]
        if rest := [opened for opened in waiting if opened not in done]:
            self._unapplied[lane] = rest
        for opened in done:
            self._done(opened, lane)

    def _done(self, opened: Opened, lane: int) -> None:
        """One lane of a request is done; answer it if that was the last. A second answer is not given."""
        opened.waiting.discard(lane)
        if not opened.waiting and self._open.get(opened.worker, {}).pop(opened.id, None) is not None:
            frames = opened.output.buffers() if isinstance(opened.output, Framed) else ()
            halt = self._halt_clock is not None and self._halt_clock < opened.clock
            self._finished(opened.worker, Done(opened.id, opened.version, opened.staleness, halt), frames)

    def _split(self, lane: int, parts: tuple[int, ...]) -> None:
        """A lane parts: what was noted for it holds for each of its parts."""
        self._optimization.split(lane, parts)
        for worker, _, clock in [place for place in self._pushed if place[1] == lane]:
            pushed = self._pushed.pop((worker, lane, clock))
            self._pushed |= {(worker, part, clock): pushed for part in parts}
        for worker, _, clock in [place for place in self._expected if place[1] == lane]:
            expected = self._expected.pop((worker, lane, clock))
            self._expected |= {(worker, part, clock): list(expected) for part in parts}
        if unapplied := self._unapplied.pop(lane, None):
            self._unapplied |= {part: list(unapplied) for part in parts}
        for opened in itertools.chain.from_iterable(requests.values() for requests in self._open.values()):
            if lane in opened.waiting:
                opened.waiting.remove(lane)
                opened.waiting.update(parts)
