"""Clipping by the norm over several servers, under any order of messages, repeated messages and deaths of workers.

Each server is a real `PendingRequests`. A worker pushes gated rounds, asks all servers for their squared norms, and
releases the rounds with the scale that follows from the total.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.cluster.messages import Done, OptimizerSpec, PushHeader, Response, SquaredNorm
from echelon.cluster.placement import ALIGN, KeySpec, Layout
from echelon.errors import UsageError
from echelon.schemes import Action, Apply, Decision, Engine, Gathered, Reply, Rules, bsp, gsp, scale_to_clip
from echelon.server.shard.pending_requests import PendingRequests
from echelon.server.storage.execute import Storage
from echelon.server.storage.memory import Mapped
from echelon.server.storage.optimization import Optimization, PushedGradient

pytestmark = pytest.mark.numeric

SGD = OptimizerSpec(
    "sgd", [{"lr": 1.0, "momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False, "maximize": True}]
)
SERVERS, KEYS, CLOCKS, MAX_NORM = 2, 2, 3, 8.0


class Recorder(Engine):
    """An engine that keeps the rounds that it applied, each with the number of its keys."""

    def __init__(self, rules: Rules, workers: Sequence[int]) -> None:
        super().__init__(rules, workers)
        self.applied: list[tuple[Apply, int]] = []
        self.keys_of: Callable[[int], Sequence[int]] = lambda lane: ()

    def release(self, worker: int, key: int, clock: int, scale: float = 1.0) -> Decision:
        decision = super().release(worker, key, clock, scale)
        self.applied += [(action, len(self.keys_of(key))) for action in updates(decision.actions)]
        return decision


class Server:
    """One server. `answer(worker, response)` receives its answers."""

    def __init__(self, rules: Rules, workers: Sequence[int], answer: Callable[[int, Response], None]) -> None:
        layout = Layout(1)
        layout.place([KeySpec(key, (ALIGN,), "float32") for key in range(KEYS)])
        optimization = Optimization(layout)
        optimization.set_optimizer(SGD)
        self.engine = Recorder(rules, workers)
        self.requests = PendingRequests(
            self.engine, Storage(layout, 0), optimization, lambda worker, response, *_: answer(worker, response)
        )
        self.engine.keys_of = self.requests.lanes.keys
        for key in range(KEYS):
            self.requests.lanes.add(key)
            optimization.add(key)

    def push(self, worker: int, request: int, keys: Sequence[int], clock: int, samples: float) -> None:
        absent = float(not samples)  # the batch has one sample, which may give these keys no gradient
        gradient = PushedGradient(memory(value_of(worker, clock)), PushHeader(samples, absent=absent, gated=True))
        self.requests.push(worker, request, keys, clock, gradient, memory(0.0))


def memory(value: float) -> Mapped:
    mapped = Mapped()
    mapped.segments[0] = torch.full((ALIGN * KEYS,), value)
    return mapped


def value_of(worker: int, clock: int) -> float:
    """Return what all elements of a worker's gradient are."""
    return float(4 * (1 + worker) * (1 + clock))


class Job:
    """Workers, servers, and a network that delivers in any order, some messages twice."""

    def __init__(self, rules: Rules, num_workers: int, draw: random.Random) -> None:
        self.rules, self.draw = rules, draw
        self.clock = dict.fromkeys(range(num_workers), 0)  # of the living workers
        self.network: list[Callable[[], object]] = []
        self.parts: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)  # (worker, clock) -> server -> square
        self.unanswered: dict[int, set[tuple[int, int]]] = {}  # worker -> (server, request) of its pushes
        self.servers = [Server(rules, range(num_workers), partial(self.receive, at)) for at in range(SERVERS)]

    def send(self, worker: int, message: Callable[[], None]) -> None:
        """Deliver a message later, if its worker lives then; sometimes twice."""
        for _ in range(1 + (self.draw.random() < 0.2)):
            self.network.append(lambda: message() if worker in self.clock else None)

    def begin_step(self, worker: int) -> None:
        """Push all keys, in one message or in two, and ask for the norm."""
        clock = self.clock[worker]
        self.unanswered[worker] = set()
        for at, server in enumerate(self.servers):
            halves = [[0, 1]] if self.draw.random() < 0.5 else [[0], [1]]
            for number, keys in enumerate(halves):
                request = 10 * clock + number
                samples = float(self.draw.random() < 0.8)  # 0: this worker has no gradient for these keys
                self.unanswered[worker].add((at, request))
                self.send(worker, partial(server.push, worker, request, keys, clock, samples))
            self.send(worker, partial(self.measure, server, worker, clock))

    def measure(self, server: Server, worker: int, clock: int) -> None:
        try:
            server.requests.measure_norm(worker, 10 * clock + 5, (0, 1), clock, None)
        except UsageError:
            assert clock < self.clock[worker], "only a message that was repeated after its round may be refused"

    def receive(self, at: int, worker: int, response: Response) -> None:
        """A worker receives an answer at once; its next messages are late anyway."""
        if worker not in self.clock:
            return
        clock = self.clock[worker]
        if isinstance(response, SquaredNorm):
            asked = response.id // 10
            assert self.parts[worker, asked].setdefault(at, response.square) == response.square
            if asked == clock and len(self.parts[worker, clock]) == SERVERS:
                self.release(worker, clock)
        else:
            assert isinstance(response, Done), response
            self.unanswered[worker].discard((at, response.id))

    def release(self, worker: int, clock: int) -> None:
        scale = scale_to_clip(sum(square for _, square in sorted(self.parts[worker, clock].items())), MAX_NORM)
        for server in self.servers:
            self.send(worker, partial(server.requests.apply_scaled, worker, (0, 1), clock, scale))

    def kill(self, worker: int) -> None:
        """End a worker; servers are told in any order."""
        del self.clock[worker]
        for server in self.servers:
            self.network.append(partial(server.requests.remove, worker))

    def run(self, deaths: int) -> None:
        for worker in self.clock:
            self.begin_step(worker)
        while self.network:
            self.network.pop(self.draw.randrange(len(self.network)))()
            if deaths and len(self.clock) > 1 and self.draw.random() < 0.03:
                deaths -= 1
                self.kill(self.draw.choice(sorted(self.clock)))
            for worker, clock in list(self.clock.items()):
                if not self.unanswered[worker] and clock < CLOCKS - 1:
                    self.clock[worker] += 1
                    self.begin_step(worker)


SCHEMES = {"BSP": bsp(), "GSP": gsp([[0, 1], [2]])}


@pytest.mark.parametrize("scheme", SCHEMES)
@given(st.integers(1, 3), st.integers(0, 2), st.integers(0))
@settings(deadline=None)
def test_every_round_is_applied_with_the_norm_over_all_servers(
    scheme: str, num_workers: int, deaths: int, seed: int
) -> None:
    rules = SCHEMES[scheme]
    job = Job(rules, num_workers, random.Random(seed))
    job.run(deaths)
    for worker, clock in job.clock.items():
        assert clock == CLOCKS - 1, f"worker {worker} is held at clock {clock}"
        assert not job.unanswered[worker], f"worker {worker} got no weights for {job.unanswered[worker]}"
    survivors = {rules.group_of(worker) for worker in job.clock}
    for group in survivors:
        for clock in range(CLOCKS):
            check_round(job, group, clock)


def check_round(job: Job, group: int, clock: int) -> None:
    """Compare the scale of a round's updates with the norm of what these updates contain."""
    square, scales = 0.0, set()
    for server in job.servers:
        for action, num_keys in server.engine.applied:
            if job.rules.group_of(action.contributions[0].worker) == group and action.clock == clock:
                samples = len(action.contributions) + action.absent
                mean = sum(value_of(part.worker, clock) for part in action.contributions) / samples
                square += ALIGN * num_keys * mean * mean
                scales.add(action.scale)
    assert len(scales) <= 1, "all servers apply a round with the same scale"
    assert all(scale == pytest.approx(scale_to_clip(square, MAX_NORM)) for scale in scales)


@given(st.integers(1, 3), st.integers(0))
def test_a_gate_that_opens_at_once_changes_nothing(num_workers: int, seed: int) -> None:
    """An engine whose gated rounds are released as soon as they are gathered acts as one without gates."""
    draw = random.Random(seed)
    rules = gsp([[0, 1], [2]], 1)
    plain, gated = (Engine(rules, range(num_workers)) for _ in range(2))
    for engine in (plain, gated):
        engine.add_key(0)
    for _ in range(30):
        worker, clock = draw.randrange(num_workers), draw.randrange(4)
        if draw.random() < 0.1:
            expected, found = (list(engine.leave(worker).actions) for engine in (plain, gated))
        elif draw.random() < 0.5:
            expected, found = (list(engine.pull(worker, 0, clock).actions) for engine in (plain, gated))
        else:
            expected = list(plain.push(worker, 0, clock, 1.0).actions)
            found = list(gated.push(worker, 0, clock, 1.0, gated=True).actions)
        while gathered := next((action for action in found if isinstance(action, Gathered)), None):
            at = found.index(gathered)
            found[at : at + 1] = gated.release(gathered.contributions[0].worker, 0, gathered.clock).actions
        assert [without_staleness(one) for one in updates(found)] == [without_staleness(o) for o in updates(expected)]
        assert sorted(answered(found)) == sorted(answered(expected))
        assert gated.version(0) == plain.version(0)


def updates(actions: Sequence[Action]) -> list[Apply]:
    return [action for action in actions if isinstance(action, Apply)]


def without_staleness(action: Apply) -> tuple[object, ...]:
    """Return an update without what a worker read before: of two rounds, gates let the first be answered before."""
    return action.clock, [part[:2] for part in action.contributions], action.divisor, action.version


def answered(actions: Sequence[Action]) -> list[tuple[int, int]]:
    return [(action.worker, action.clock) for action in actions if isinstance(action, Reply)]
