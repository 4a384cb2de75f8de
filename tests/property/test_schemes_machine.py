"""The engine under arbitrary events, compared with a naive model and checked from the workers' point of view.

`Anything` sends arbitrary messages: pushes far ahead, pulls of clocks that were never reached, messages of dead and
unknown workers, each message repeatedly. The engine must take the same actions as the model.
`Workers` push, then pull, over a network that reorders and repeats messages. The guarantees are checked on what the
workers observe.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from scheme_model import Model

from echelon.schemes import Action, Apply, Decision, Divisor, Engine, Reply, Rules, asp, bsp, gsp, ssp
from echelon.schemes.engine import (
    ANSWERED,
    APPLIED,
    DUPLICATE,
    HELD_FOR_BOUND,
    HELD_FOR_MEMBERS,
    JOINED,
    NOT_A_MEMBER,
    OBSERVER,
    RELEASED,
    RELEASED_NOTHING,
    TOO_LATE,
)

WORKERS = 4
STRANGER = 6  # in no listed group, and absent unless it joins
GROUPS = ((0, 2), (1, 3))


class Case(NamedTuple):
    """A scheme as the engine gets it, and as the model gets it."""

    rules: Rules
    group: Callable[[int], Hashable]
    bound: int | None = None
    divisor: Divisor = Divisor.ONE


def in_pairs(worker: int) -> Hashable:
    return "even" if worker in GROUPS[0] else "odd" if worker in GROUPS[1] else f"alone {worker}"


CASES = {
    "BSP": Case(bsp(), lambda _: "all"),
    "ASP": Case(asp(), lambda worker: worker, divisor=Divisor.ROUND),
    "ASP, MXNet's": Case(asp(Divisor.ONE), lambda worker: worker),
    "SSP(0)": Case(ssp(0), lambda worker: worker, bound=0, divisor=Divisor.ROUND),
    "SSP(2)": Case(ssp(2), lambda worker: worker, bound=2, divisor=Divisor.ROUND),
    "GSP": Case(gsp(GROUPS), in_pairs, divisor=Divisor.STALENESS),
    "GSP(1)": Case(gsp(GROUPS, 1), in_pairs, bound=1, divisor=Divisor.STALENESS),
}

who = st.sampled_from([*range(WORKERS), STRANGER])
amounts = st.sampled_from([1.0, 32.0, 7.5, 0.0, None])
pushed = st.sampled_from([(1.0,), (32.0,), (7.5,), (0.0,), (0.0, 4.0), (None,)])  # samples, absent


def ordered(actions: list[Action] | tuple[Action, ...], key: int) -> tuple[list[Apply], list[Reply]]:
    """Return the updates of a key in order, and its answers, which must follow them in any order."""
    mine = [action for action in actions if action.key == key]
    applies = [action for action in mine if isinstance(action, Apply)]
    replies = [action for action in mine if isinstance(action, Reply)]
    assert mine == [*applies, *replies]
    return applies, sorted(replies)


class Anything(RuleBasedStateMachine):
    """The engine and the model get the same events and must take the same actions."""

    case: Case

    @initialize(workers=st.sets(st.sampled_from(range(WORKERS)), min_size=1), keys=st.integers(1, 2))
    def begin(self, workers: set[int], keys: int) -> None:
        self.engine = Engine(self.case.rules, workers)
        for key in range(keys):
            self.engine.add_key(key)
        self.model = Model(self.case.group, self.case.bound, self.case.divisor, workers, range(keys))
        self.sent: list[tuple[Any, ...]] = []
        self.counted: Counter[tuple[int, int, int]] = Counter()  # (worker, key, clock) -> times applied

    def key(self, number: int) -> int:
        return number % len(self.model.keys)

    def deliver(self, message: tuple[Any, ...]) -> None:
        kind, *rest = message
        self.compare(getattr(self.engine, kind)(*rest), *self.expect(kind, *rest))

    def compare(self, decision: Decision, expected: list[Action], reason: str) -> None:
        assert decision.reason == reason
        for key in self.model.keys:
            assert ordered(decision.actions, key) == ordered(expected, key), reason
        for action in decision.actions:
            if isinstance(action, Apply):
                ranks = [part.worker for part in action.contributions]
                assert ranks == sorted(set(ranks))
                self.counted.update((rank, action.key, action.clock) for rank in ranks)

    def expect(self, kind: str, worker: int, key: int, clock: int, *rest: Any) -> tuple[list[Action], str]:
        """Return the actions of the model and the expected reason."""
        model, active, before = self.model, worker in self.model.active, self.model.done(key, worker)
        if kind == "pull":
            actions = model.pull(worker, key, clock)
            held = HELD_FOR_MEMBERS if before < clock else HELD_FOR_BOUND
            return actions, OBSERVER if not active else ANSWERED if actions else held
        seen = clock < model.next_clock(key, worker) or (worker, clock) in model.keys[key].pending
        actions = model.push(worker, key, clock, *rest)
        new = APPLIED if model.done(key, worker) > before else HELD_FOR_MEMBERS
        return actions, NOT_A_MEMBER if not active else DUPLICATE if seen else new

    def send(self, *message: object) -> None:
        self.sent.append(message)
        self.deliver(message)

    @rule(worker=who, number=st.integers(0, 2), samples=pushed)
    def push_the_next(self, worker: int, number: int, samples: tuple[float | None, ...]) -> None:
        key = self.key(number)
        self.send("push", worker, key, self.model.next_clock(key, worker), *samples)

    @rule(worker=who, number=st.integers(0, 2), offset=st.integers(-2, 3), samples=pushed)
    def push_any(self, worker: int, number: int, offset: int, samples: tuple[float | None, ...]) -> None:
        key = self.key(number)
        self.send("push", worker, key, max(0, self.model.done(key, worker) + offset), *samples)

    @rule(worker=who, number=st.integers(0, 2))
    def pull_after_push(self, worker: int, number: int) -> None:
        key = self.key(number)
        self.send("pull", worker, key, self.model.next_clock(key, worker))

    @rule(worker=who, number=st.integers(0, 2), offset=st.integers(-2, 3))
    def pull_any(self, worker: int, number: int, offset: int) -> None:
        key = self.key(number)
        self.send("pull", worker, key, max(0, self.model.done(key, worker) + offset))

    @precondition(lambda self: self.sent)
    @rule(at=st.integers(0, 1000))
    def repeat(self, at: int) -> None:
        self.deliver(self.sent[-1 - at % len(self.sent)])

    @rule(worker=who, finished=st.booleans())
    def leave(self, worker: int, finished: bool) -> None:
        active = worker in self.model.active
        decision = self.engine.leave(worker, finished=finished)
        actions = self.model.leave(worker, finished)
        self.compare(decision, actions, NOT_A_MEMBER if not active else RELEASED if actions else RELEASED_NOTHING)

    @rule(worker=who, offset=st.integers(-2, 3), own=st.booleans())
    def join(self, worker: int, offset: int, own: bool) -> None:
        """Join or move to any clock, the same for all keys or the first free one of each."""
        clocks = self.model.next_clocks(worker)
        assert self.engine.next_clocks(worker) == clocks
        first = max(0, max(clocks.values()) + offset)
        firsts = {key: max(0, clock + offset) for key, clock in clocks.items()} if own else {}
        decision = self.engine.join(worker, first, firsts)
        actions = self.model.join(worker, first, firsts)
        self.compare(decision, actions or [], TOO_LATE if actions is None else JOINED)

    @rule(worker=who)
    def pause(self, worker: int) -> None:
        """A worker pauses when all its pushes are answered."""
        if any(pusher == worker for state in self.model.keys.values() for pusher, _ in state.pending):
            return
        active = worker in self.model.active
        decision = self.engine.pause(worker)
        actions = self.model.pause(worker)
        self.compare(decision, actions, NOT_A_MEMBER if not active else RELEASED if actions else RELEASED_NOTHING)

    @rule(worker=who)
    def resume(self, worker: int) -> None:
        self.engine.resume(worker)
        self.model.resume(worker)

    @precondition(lambda self: len(self.model.keys) < 3)
    @rule()
    def add_key(self) -> None:
        key = len(self.model.keys)
        self.engine.add_key(key)
        self.model.add_key(key)

    @invariant()
    def applied_at_most_once(self) -> None:
        assert all(times == 1 for times in self.counted.values()), self.counted

    @invariant()
    def versions_count_updates(self) -> None:
        for key, state in self.model.keys.items():
            assert self.engine.version(key) == len(state.applied)
            assert [apply.version for apply in state.applied] == [n + 1 for n in range(len(state.applied))]

    @invariant()
    def active_workers_and_clocks_agree(self) -> None:
        assert self.engine.workers == self.model.active
        for key in self.model.keys:
            for worker in [*range(WORKERS), STRANGER]:
                assert self.engine.clock(worker, key) == self.model.done(key, worker)

    @invariant()
    def missing_names_the_workers_that_a_pull_waits_for(self) -> None:
        for key, state in self.model.keys.items():
            for worker in self.model.active:
                done = self.model.done(key, worker)  # also for a pull that would be answered
                for clock in {done, *(c for w, c in state.held if w == worker)}:
                    missing = self.engine.missing(worker, key, clock)
                    assert bool(missing) == (not self.model.may_answer(key, worker, clock))
                    for other, needed in missing.items():
                        assert needed == self.model.done(key, other)
                        assert other in self.model.owed(key, self.case.group(other))


class Workers(RuleBasedStateMachine):
    """Workers push all keys, then pull all keys. The network delivers in any order, and some messages twice."""

    case: Case

    @initialize(count=st.integers(1, WORKERS), keys=st.integers(1, 2))
    def begin(self, count: int, keys: int) -> None:
        self.keys = range(keys)
        self.engine = Engine(self.case.rules, range(count))
        for key in self.keys:
            self.engine.add_key(key)
        self.clock = {worker: dict.fromkeys(self.keys, 0) for worker in range(count)}  # of active workers
        self.wants: dict[int, set[int]] = {worker: set() for worker in range(count)}  # keys not answered yet
        self.asked: dict[int, int] = {}  # worker that will join -> the clock that it was told
        self.lost: set[int] = set()  # of these, those whose old messages are lost
        self.network: list[tuple[Any, ...]] = []
        self.delivered: list[tuple[Any, ...]] = []
        self.arrived: dict[tuple[int, int], set[int]] = {}  # (worker, key) -> clocks pushed and delivered
        self.base: dict[tuple[int, int], int] = {}  # (worker, key) -> its first clock
        self.rounds: set[tuple[Hashable, int, int]] = set()
        self.updates: dict[int, list[Hashable]] = {key: [] for key in self.keys}  # the group of each update
        self.read: dict[tuple[int, int], int] = {}

    # --- actions of the workers

    def ready(self) -> list[int]:
        return [worker for worker in self.clock if not self.wants[worker]]

    @precondition(lambda self: self.ready())
    @rule(choice=st.integers(0, 11), samples=amounts)
    def step(self, choice: int, samples: float | None) -> None:
        worker = self.ready()[choice % len(self.ready())]
        for key in self.keys:
            self.network.append(("push", worker, key, self.clock[worker][key], samples))
            self.clock[worker][key] += 1
        self.ask(worker)

    def ask(self, worker: int) -> None:
        self.wants[worker] = set(self.keys)
        self.network += [("pull", worker, key, self.clock[worker][key]) for key in self.keys]

    @precondition(lambda self: self.clock)
    @rule(choice=st.integers(0, 11))
    def die(self, choice: int) -> None:
        worker = sorted(self.clock)[choice % len(self.clock)]
        del self.clock[worker], self.wants[worker]
        self.asked.pop(worker, None)
        self.act(self.engine.leave(worker).actions)

    @rule(worker=who)
    def ask_for_clocks(self, worker: int) -> None:
        """A new worker, or one that pauses, asks for the clocks. The others continue until it joins."""
        if worker not in self.clock or not self.wants[worker]:
            if worker in self.clock:
                del self.clock[worker], self.wants[worker]
                self.act(self.engine.pause(worker).actions)
            self.lost.add(worker)
            self.asked[worker] = 1 + max(self.engine.next_clocks(worker).values())

    @precondition(lambda self: self.asked)
    @rule(choice=st.integers(0, 11))
    def join(self, choice: int) -> None:
        """One number for all keys. If it comes too late, the worker asks again."""
        worker = sorted(self.asked)[choice % len(self.asked)]
        first = self.asked.pop(worker)
        if worker in self.lost:  # its connection was closed: nothing of its old one arrives any more
            self.network = [message for message in self.network if message[1] != worker]
            self.delivered = [message for message in self.delivered if message[1] != worker]
        decision = self.engine.join(worker, first)
        self.lost.discard(worker)
        if decision.reason == TOO_LATE:
            assert any(self.engine.next_clocks(worker)[key] > first for key in self.keys)
            return
        self.clock[worker] = dict.fromkeys(self.keys, first)
        for key in self.keys:
            assert first not in self.arrived.get((worker, key), ()), "the worker pushes a clock again"
            self.base[worker, key] = first
            self.read[worker, key] = self.engine.version(key)
        self.ask(worker)
        self.act(decision.actions)

    # --- actions of the network

    @precondition(lambda self: self.network)
    @rule(choice=st.integers(0, 1000))
    def deliver(self, choice: int) -> None:
        message = self.network.pop(choice % len(self.network))
        self.delivered.append(message)
        self.arrive(message)

    @precondition(lambda self: self.network)
    @rule()
    def deliver_all(self) -> None:
        while self.network:
            self.deliver(0)

    @precondition(lambda self: self.delivered)
    @rule(choice=st.integers(0, 1000))
    def deliver_again(self, choice: int) -> None:
        self.arrive(self.delivered[-1 - choice % len(self.delivered)])

    def arrive(self, message: tuple[Any, ...]) -> None:
        kind, worker, key, clock, *_ = message
        if kind == "push" and worker in self.clock and clock >= self.base.get((worker, key), 0):
            self.arrived.setdefault((worker, key), set()).add(clock)
        self.act(getattr(self.engine, kind)(*message[1:]).actions)

    # --- what the workers observe

    def act(self, actions: tuple[Action, ...]) -> None:
        for action in actions:
            if isinstance(action, Apply):
                self.check_update(action)
            elif isinstance(action, Reply) and action.worker in self.clock:
                self.check_answer(action)

    def check_update(self, action: Apply) -> None:
        group = self.case.group(action.contributions[0].worker)
        assert (group, action.key, action.clock) not in self.rounds, "a group's clock was applied twice"
        self.rounds.add((group, action.key, action.clock))
        members = {w for w in self.clock if self.case.group(w) == group}
        for worker in members:  # no active member was left out of the round
            first = self.base.get((worker, action.key), 0)
            assert first > action.clock or action.clock in self.arrived[worker, action.key]
        before = self.updates[action.key]
        since = len(before) - 1 - max((n for n, g in enumerate(before) if g == group), default=-1)
        if self.case.divisor is Divisor.ONE:
            assert action.divisor == 1
        elif self.case.divisor is Divisor.ROUND:
            assert action.divisor >= 1
        elif not self.base:  # no worker ever joined: V_g is the count at the group's last update
            assert action.divisor == since + 1
        for part in action.contributions:
            assert self.case.group(part.worker) == group
            assert part.samples != 0
            assert part.staleness == len(before) - self.read.get((part.worker, action.key), 0)
        before.append(group)
        assert action.version == len(before)

    def check_answer(self, reply: Reply) -> None:
        assert reply.version == len(self.updates[reply.key])
        self.read[reply.worker, reply.key] = reply.version
        if reply.clock == self.clock[reply.worker][reply.key]:
            self.wants[reply.worker].discard(reply.key)
        if self.case.bound is not None:
            assert reply.clock - self.slowest(reply.key) <= self.case.bound
        for clock in range(self.base.get((reply.worker, reply.key), 0), reply.clock):
            assert clock in self.arrived[reply.worker, reply.key], "answered before its own push was applied"

    def pushed(self, worker: int, key: int) -> int:
        """Return the number of clocks of a worker that were delivered without a gap."""
        clock = self.base.get((worker, key), 0)
        while clock in self.arrived.get((worker, key), ()):
            clock += 1
        return clock

    def slowest(self, key: int) -> int:
        """Return the clock of the slowest active group, which is that of its slowest member."""
        return min(self.pushed(worker, key) for worker in self.clock)

    @invariant()
    def some_worker_can_continue(self) -> None:
        if self.clock and not self.network:
            assert self.ready(), f"all of {sorted(self.clock)} are held: {self.wants}"

    def teardown(self) -> None:
        """After any history: when everything is delivered and all workers continue, all reach every clock."""
        if not getattr(self, "clock", None):
            return
        goal = 3 + max(clock for clocks in self.clock.values() for clock in clocks.values())
        for _ in range(goal * len(self.clock) * 2 + 10):
            self.deliver_all()
            self.some_worker_can_continue()
            behind = [w for w in self.ready() if min(self.clock[w].values()) < goal]
            if not behind:
                break
            slow = min(behind, key=lambda w: min(self.clock[w].values()))
            self.step(self.ready().index(slow), 1.0)
        assert all(min(clocks.values()) >= goal for clocks in self.clock.values())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("machine", [Anything, Workers])
def test_engine(machine: type[Anything | Workers], name: str) -> None:
    driven = type(f"{machine.__name__} {name}", (machine,), {"case": CASES[name]})
    run_state_machine_as_test(driven, settings=settings(stateful_step_count=40))
