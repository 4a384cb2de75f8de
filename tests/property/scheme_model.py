"""A naive second implementation of the schemes, as a model for tests: it checks everything again after every event.

It shares only the types of actions with `echelon.schemes`. A function, not `Rules`, gives the group of a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from echelon.schemes import Action, Apply, Contribution, Divisor, Reply


@dataclass
class KeyModel:
    """One key: what was pushed and applied, which pulls are held, and which version each worker read."""

    version: int = 0
    done: dict[Hashable, int] = field(default_factory=dict)  # group -> rounds finished
    last: dict[Hashable, int] = field(default_factory=dict)  # group -> version after its last update
    first: dict[int, int] = field(default_factory=dict)  # worker -> the first clock that it takes part in
    pending: dict[tuple[int, int], float | None] = field(default_factory=dict)  # (worker, clock) -> samples
    absent: dict[tuple[int, int], float] = field(default_factory=dict)  # the same for batches without a gradient
    pushed: list[tuple[int, float]] = field(default_factory=list)  # (worker, samples), in the order of arrival
    held: set[tuple[int, int]] = field(default_factory=set)
    read: dict[int, int] = field(default_factory=dict)
    applied: list[Apply] = field(default_factory=list)


class Model:
    """The dials are `group` of a worker, `bound` in clocks or None, and `divisor`."""

    def __init__(
        self, group: Callable[[int], Hashable], bound: int | None, divisor: Divisor, workers: set[int], keys: range
    ) -> None:
        self.group, self.bound, self.divisor = group, bound, divisor
        self.active = set(workers)
        self.alive = set(workers)  # the active and the finished
        self.paused: set[int] = set()
        self.keys: dict[int, KeyModel] = {}
        for key in keys:
            self.add_key(key)

    def add_key(self, key: int) -> None:
        self.keys[key] = KeyModel()

    def done(self, key: int, worker: int) -> int:
        """Return the number of rounds that a worker's group has finished."""
        return self.keys[key].done.get(self.group(worker), 0)

    def next_clock(self, key: int, worker: int) -> int:
        """Return the first clock that a worker may still push."""
        clock = max(self.done(key, worker), self.keys[key].first.get(worker, 0))
        while (worker, clock) in self.keys[key].pending:
            clock += 1
        return clock

    def slowest(self, key: int) -> int:
        return min(self.done(key, worker) for worker in self.active)

    def may_answer(self, key: int, worker: int, clock: int) -> bool:
        ahead = clock - self.slowest(key)
        return self.done(key, worker) >= clock and (self.bound is None or ahead <= self.bound)

    def owed(self, key: int, group: Hashable) -> set[int]:
        """Return the active members whose push the present round of the group still needs."""
        state = self.keys[key]
        now = state.done.get(group, 0)
        members = {worker for worker in self.active if self.group(worker) == group}
        return {w for w in members if state.first.get(w, 0) <= now and (w, now) not in state.pending}

    def push(self, worker: int, key: int, clock: int, samples: float | None, absent: float = 0.0) -> list[Action]:
        state = self.keys[key]
        if worker not in self.active or clock < max(self.done(key, worker), state.first.get(worker, 0)):
            return []
        if (worker, clock) in state.pending:
            return []
        state.pending[worker, clock] = samples
        state.absent[worker, clock] = absent
        if samples is not None:
            state.pushed.append((worker, samples + absent))
        return self.settle()

    def pull(self, worker: int, key: int, clock: int) -> list[Action]:
        if worker not in self.active:
            return [Reply(key, worker, clock, self.keys[key].version)]
        self.keys[key].held.add((worker, clock))
        return self.settle()

    def leave(self, worker: int, finished: bool) -> list[Action]:
        if worker not in self.active:
            if worker in self.paused and not finished:
                self.paused.discard(worker)
                self.alive.discard(worker)
                self.forget(worker)
            return []
        if not finished:
            self.alive.remove(worker)
        self.active.discard(worker)
        self.forget(worker)
        return self.settle()

    def pause(self, worker: int) -> list[Action]:
        if worker in self.active:
            self.paused.add(worker)
        return self.leave(worker, finished=True)

    def resume(self, worker: int) -> None:
        if worker in self.paused:
            self.paused.discard(worker)
            self.active.add(worker)

    def forget(self, worker: int) -> None:
        """Drop what waits for a worker that does not take part any more, and the rounds that nobody can complete."""
        group = self.group(worker)
        over = not any(self.group(other) == group for other in self.active | self.paused)
        for state in self.keys.values():
            state.held = {pull for pull in state.held if pull[0] != worker}
            state.first.pop(worker, None)
            if over:
                state.pending = {p: s for p, s in state.pending.items() if self.group(p[0]) != group}

    def first_free(self, key: int, worker: int) -> int:
        own = [clock + 1 for w, clock in self.keys[key].pending if w == worker]
        return max([self.done(key, worker), *own])

    def next_clocks(self, worker: int) -> dict[int, int]:
        alone = not any(self.group(other) == self.group(worker) for other in self.active)
        others = {key: self.slowest(key) if alone and self.active else 0 for key in self.keys}
        return {key: max(self.first_free(key, worker), others[key]) for key in self.keys}

    def join(self, worker: int, first: int, firsts: dict[int, int]) -> list[Action] | None:
        """Return None if the clock is refused."""
        group = self.group(worker)
        starts = {key: firsts.get(key, first) for key in self.keys}
        if any(starts[key] < self.first_free(key, worker) for key in self.keys):
            return None
        alone = not any(self.group(other) == group for other in self.active)
        for key, state in self.keys.items():
            if alone:
                state.last[group] = state.version
            state.first[worker] = starts[key]
            state.read[worker] = state.version
        self.active.add(worker)
        self.alive.add(worker)
        self.paused.discard(worker)
        return self.settle()

    def settle(self) -> list[Action]:
        """Do everything that is possible now, key by key: first updates, then answers."""
        actions: list[Action] = []
        for key, state in self.keys.items():
            for group in sorted({self.group(worker) for worker in self.active}, key=str):
                actions += self.finish_rounds(key, state, group)
            for worker, clock in sorted(state.held):
                if self.may_answer(key, worker, clock):
                    state.held.remove((worker, clock))
                    state.read[worker] = state.version
                    actions.append(Reply(key, worker, clock, state.version))
        return actions

    def finish_rounds(self, key: int, state: KeyModel, group: Hashable) -> list[Action]:
        actions: list[Action] = []
        while True:
            if self.owed(key, group):  # this ends: every active member has a first clock
                return actions
            now = state.done.get(group, 0)
            parts, absent = [], 0.0
            for worker in sorted(w for w, clock in state.pending if clock == now and self.group(w) == group):
                samples = state.pending.pop((worker, now))
                absent += state.absent[worker, now]
                if samples is None or samples > 0:
                    parts.append(Contribution(worker, samples, state.version - state.read.get(worker, 0)))
            if parts:
                divisor = self.divisor_of(state, group, parts)
                state.version += 1
                state.last[group] = state.version
                state.applied.append(Apply(key, now, tuple(parts), divisor, state.version, absent))
                actions.append(state.applied[-1])
            state.done[group] = now + 1

    def divisor_of(self, state: KeyModel, group: Hashable, parts: list[Contribution]) -> float:
        if self.divisor is Divisor.STALENESS:
            return max(1, state.version - state.last.get(group, 0) + 1)
        own = {part.worker: part.samples for part in parts if part.samples is not None}
        if self.divisor is Divisor.ONE or len(own) < len(parts):
            return 1
        mean = sum(own.values()) / len(own)
        others = [dict(state.pushed).get(worker, mean) for worker in self.alive - own.keys()]
        return (sum(own.values()) + sum(others)) / sum(own.values())
