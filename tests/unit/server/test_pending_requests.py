"""The book-keeping of requests on a server, without processes or sockets: who is answered, when, and with what."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from echelon.cluster.messages import Contents, Done, OptimizerSpec, PushHeader, Response, Resumed
from echelon.cluster.placement import ALIGN, KeySpec, Layout
from echelon.schemes import Engine, Rules, asp, bsp, gsp, ssp
from echelon.server.shard.pending_requests import PendingRequests
from echelon.server.storage.execute import Storage
from echelon.server.storage.memory import Mapped, empty_frames, frame_pieces
from echelon.server.storage.optimization import Optimization, PushedGradient
from echelon.transport.outbox import Precedence

pytestmark = pytest.mark.numeric

SGD = OptimizerSpec(
    "sgd", [{"lr": 1.0, "momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False, "maximize": True}]
)


class Server:
    """Pending requests over small keys. A worker's gradient is one number; SGD adds it to the weights."""

    def __init__(self, rules: Rules, num_workers: int, num_keys: int = 1) -> None:
        self.layout = Layout(1)
        self.layout.place([KeySpec(key, (ALIGN,), "float32") for key in range(num_keys)])
        optimization = Optimization(self.layout)
        optimization.set_optimizer(SGD)
        self.answers: list[tuple[int, Done]] = []
        self.resumed: list[tuple[int, int, dict[int, int]]] = []  # worker, request, clocks
        self.frames: list[Sequence[memoryview]] = []
        self.precedences: list[Precedence | None] = []
        self.now = 0.0  # seconds; tests of times move it
        self.requests = PendingRequests(
            Engine(rules, range(num_workers)), Storage(self.layout, 0), optimization, self.answer, lambda: self.now
        )
        for key in range(num_keys):
            self.requests.lanes.add(key)
            optimization.add(key)
        self.outputs = [self.memory() for _ in range(num_workers)]

    def answer(
        self, worker: int, response: Response, frames: Sequence[memoryview], precedence: Precedence | None = None
    ) -> None:
        if isinstance(response, Resumed):
            self.resumed.append((worker, response.id, dict(zip(response.keys, response.clocks, strict=True))))
            return
        assert isinstance(response, Done)
        self.answers.append((worker, response))
        self.frames.append(frames)
        self.precedences.append(precedence)

    def memory(self, value: float = 0.0) -> Mapped:
        mapped = Mapped()
        mapped.segments[0] = torch.full((ALIGN * len(self.layout.slots),), value)
        return mapped

    def push(
        self,
        worker: int,
        request: int,
        clock: int,
        value: float,
        *,
        keys: Sequence[int] = (0,),
        samples: float | None = None,
        pull: bool = True,
        priority: int = 0,
    ) -> None:
        gradient = PushedGradient(self.memory(value), PushHeader(samples))
        output = self.outputs[worker] if pull else None
        self.requests.push(worker, request, keys, clock, gradient, output, priority)

    def pull(self, worker: int, request: int, clock: int, *, keys: Sequence[int] = (0,), priority: int = 0) -> None:
        self.requests.pull(worker, request, keys, clock, self.outputs[worker], priority)

    def answered(self) -> list[tuple[int, Done]]:
        """The answers since the last call, without what their weights contain."""
        answers, self.answers = self.answers, []
        return [(worker, replace(done, contents=[])) for worker, done in answers]

    def seen(self, worker: int, key: int = 0) -> float:
        """The weight of a key in a worker's memory."""
        slot = self.layout.slots[key]
        (value,) = set(self.outputs[worker].view(0, slot.start, slot.start + slot.length).tolist())
        return float(value)


def by_worker(answers: list[tuple[int, Done]]) -> dict[int, Done]:
    assert len(dict(answers)) == len(answers)
    return dict(answers)


# --- when a request is answered


def test_an_answer_says_how_long_it_was_held() -> None:
    server = Server(bsp(), num_workers=2)
    server.push(0, request=1, clock=0, value=1.0)
    server.now = 0.75
    server.push(1, request=1, clock=0, value=2.0)
    assert [(worker, done.held_s) for worker, done in server.answers] == [(0, 0.75), (1, 0.0)]


def test_an_answer_says_which_rounds_of_every_group_the_weights_contain() -> None:
    server = Server(asp(), num_workers=2, num_keys=2)
    for request, keys in enumerate([(0, 1), (0,)], 1):
        server.push(0, request, clock=request - 1, value=1.0, keys=keys)
    server.push(1, request=1, clock=0, value=1.0, keys=(0, 1))
    assert [done.contents for _, done in server.answers] == [
        [Contents(1, {0: 1, 1: 0})],
        [Contents(2, {0: 2, 1: 0})],
        [Contents(3, {0: 2, 1: 1}, [0]), Contents(2, {0: 1, 1: 1}, [1])],
    ]


def test_a_decision_is_described_with_its_reason_and_who_is_missing() -> None:
    server = Server(bsp(), num_workers=3)
    server.now = 10.0
    server.push(1, request=1, clock=0, value=1.0)
    described = "worker 1, clock 1: held: members of the group have not pushed this clock (worker 0, 2)"
    assert server.requests.activity.decision == described
    server.push(0, request=1, clock=0, value=1.0)
    assert server.requests.activity.decision == described, "a description costs time, so there are few per second"


def test_a_push_is_answered_with_the_weights_when_its_round_is_applied() -> None:
    server = Server(bsp(), 2)
    server.push(0, 7, 0, 1.0)
    assert server.answered() == []
    assert server.requests.waiting.find(0, 7) is not None
    server.push(1, 9, 0, 10.0)
    assert server.answered() == [(0, Done(7, version=1)), (1, Done(9, version=1))]
    assert (server.seen(0), server.seen(1)) == (11.0, 11.0)
    assert server.requests.waiting.find(0, 7) is None


def test_an_answer_has_the_priority_and_the_keys_of_its_request() -> None:
    server = Server(bsp(), 1, num_keys=2)
    server.push(0, 1, 0, 1.0, keys=(0, 1), priority=5)
    server.push(0, 2, 1, 1.0, keys=(1,), pull=False, priority=-1)
    server.pull(0, 3, 1, keys=(0,), priority=7)
    assert server.precedences == [Precedence(5, (0, 1)), Precedence(-1, (1,)), Precedence(7, (0,))]


def test_a_push_that_does_not_pull_is_answered_when_it_is_applied() -> None:
    server = Server(bsp(), 2)
    server.push(0, 7, 0, 1.0, pull=False)
    assert server.answered() == []
    server.push(1, 9, 0, 10.0, pull=False)
    assert by_worker(server.answered()) == {0: Done(7), 1: Done(9)}
    assert (server.seen(0), server.seen(1)) == (0.0, 0.0)
    server.pull(0, 8, 1)
    assert server.answered() == [(0, Done(8, version=1))]
    assert server.seen(0) == 11.0


def test_a_pull_waits_for_the_rounds_before_its_clock() -> None:
    server = Server(bsp(), 2)
    server.push(0, 1, 0, 1.0, pull=False)
    server.pull(0, 2, 1)
    pending = server.requests.waiting.find(0, 2)
    assert pending is not None
    assert pending.waiting == {0}
    server.push(1, 1, 0, 1.0, pull=False)
    assert sorted(done.id for worker, done in server.answered() if worker == 0) == [1, 2]
    assert server.seen(0) == 2.0


def test_gradients_are_weighted_by_samples() -> None:
    server = Server(bsp(), 2)
    server.push(0, 1, 0, 1.0, samples=1.0)
    server.push(1, 1, 0, 5.0, samples=3.0)
    assert server.seen(0) == 4.0


def test_a_round_of_zero_samples_is_answered_and_changes_nothing() -> None:
    server = Server(bsp(), 2)
    server.push(0, 1, 0, 1.0, samples=0.0)
    server.push(1, 1, 0, 5.0, samples=0.0)
    assert [done.version for _, done in server.answered()] == [0, 0]
    assert server.seen(0) == 0.0


def test_a_request_of_several_keys_is_answered_once_when_the_last_key_is_done() -> None:
    server = Server(bsp(), 2, num_keys=3)
    server.push(0, 7, 0, 1.0, keys=(0, 1, 2))  # the keys become one lane
    server.push(1, 1, 0, 10.0, keys=(1,))  # which this push splits
    assert [worker for worker, _ in server.answered()] == [1]
    pending = server.requests.waiting.find(0, 7)
    assert pending is not None
    assert len(pending.waiting) == 1
    server.push(1, 2, 0, 20.0, keys=(0, 2))
    assert server.answered() == [(0, Done(7, version=1)), (1, Done(2, version=1))]
    assert [server.seen(0, key) for key in range(3)] == [21.0, 11.0, 21.0]


def test_a_split_lane_answers_pushes_without_a_pull_once() -> None:
    server = Server(bsp(), 2, num_keys=2)
    server.push(0, 7, 0, 1.0, keys=(0, 1), pull=False)
    server.push(1, 1, 0, 10.0, keys=(0,), pull=False)
    assert server.answered() == [(1, Done(1))]
    server.push(1, 2, 0, 20.0, keys=(1,), pull=False)
    assert sorted(worker for worker, _ in server.answered()) == [0, 1]


def test_the_answer_reports_the_updates_that_the_worker_had_not_seen() -> None:
    server = Server(asp(), 2)
    for clock in range(3):
        server.push(1, clock, clock, 1.0)
    server.answered()
    server.push(0, 9, 0, 1.0)
    assert server.answered() == [(0, Done(9, version=4, staleness=3))]


def test_a_bound_holds_the_answer_and_not_the_update() -> None:
    server = Server(ssp(0), 2)
    server.push(0, 1, 0, 1.0)
    assert server.answered() == []
    server.push(1, 1, 0, 2.0)
    assert by_worker(server.answered()) == {0: Done(1, version=2), 1: Done(1, version=2, staleness=1)}
    assert (server.seen(0), server.seen(1)) == (3.0, 3.0)


def test_the_answer_reports_how_many_rounds_the_worker_is_ahead_of_the_slowest() -> None:
    server = Server(ssp(2), 2)
    server.push(0, 1, 0, 1.0)
    server.push(0, 2, 1, 1.0)
    assert [done.rounds_ahead for _, done in server.answered()] == [1, 2]
    server.push(0, 3, 2, 1.0)  # three rounds ahead: held until worker 1 has pushed
    assert server.answered() == []
    server.push(1, 1, 0, 1.0)
    assert {worker: done.rounds_ahead for worker, done in server.answered()} == {0: 2, 1: 0}


@settings(deadline=None, max_examples=60)
@given(
    order=st.lists(st.integers(0, 2), max_size=40),
    bound=st.integers(0, 3),
    leaves_after=st.integers(0, 40),
)
def test_no_worker_is_further_ahead_than_the_bound(order: list[int], bound: int, leaves_after: int) -> None:
    """Each worker pushes when its turn comes and its last push was answered; worker 2 leaves at some point."""
    server = Server(ssp(bound), 3)
    clocks, waits, active = [0, 0, 0], [False] * 3, {0, 1, 2}
    for turn, worker in enumerate(order):
        if turn == leaves_after:
            active.discard(2)
            server.requests.remove(2)
        elif worker in active and not waits[worker]:
            clocks[worker] += 1
            waits[worker] = True
            server.push(worker, turn, clocks[worker] - 1, 1.0)
        for answered, done in server.answered():
            waits[answered] = False
            expected = clocks[answered] - min(clocks[other] for other in active)
            assert done.rounds_ahead == expected <= bound


def test_a_retired_worker_that_reads_is_not_counted_as_ahead() -> None:
    server = Server(ssp(1), 2)
    server.push(0, 1, 0, 1.0)
    server.requests.retire(0)
    server.answered()
    server.pull(0, 2, 1)
    assert server.answered() == [(0, Done(2, version=1))]


def test_frames_are_sent_with_the_answer() -> None:
    server = Server(bsp(), 1)
    pieces = frame_pieces(server.layout.pieces(server.layout.slots[0], 0))
    output = empty_frames(pieces, ["float32"])
    server.requests.push(0, 1, [0], 0, PushedGradient(server.memory(2.0), PushHeader()), output)
    (frame,) = server.frames[0]
    assert torch.frombuffer(frame, dtype=torch.float32).tolist() == [2.0] * ALIGN


# --- repeated requests


@pytest.mark.parametrize("pull", [True, False])
def test_a_push_that_is_repeated_while_it_waits_is_applied_and_answered_once(pull: bool) -> None:
    server = Server(bsp(), 2)
    server.push(0, 7, 0, 1.0, pull=pull)
    server.push(0, 7, 0, 1.0, pull=pull)
    server.push(1, 9, 0, 10.0)
    assert sorted((worker, done.id) for worker, done in server.answered()) == [(0, 7), (1, 9)]
    assert server.seen(1) == 11.0


def test_a_push_that_is_repeated_after_its_answer_is_answered_with_the_present_weights() -> None:
    server = Server(asp(), 1)
    server.push(0, 1, 0, 1.0)
    server.push(0, 2, 1, 1.0)
    server.answered()
    server.push(0, 1, 0, 1.0)
    assert server.answered() == [(0, Done(1, version=2))]
    assert server.seen(0) == 2.0


# --- halt


def test_answers_from_the_clock_of_a_halt_on_carry_it() -> None:
    server = Server(bsp(), 2)
    server.requests.halt_after(1)
    server.requests.halt_after(2)  # a later clock has no effect
    for clock in range(3):
        for worker in range(2):
            server.push(worker, 10 + clock, clock, 1.0)
    assert [(done.id, done.halt) for worker, done in server.answered() if worker == 0] == [
        (10, False),
        (11, True),
        (12, True),
    ]


# --- workers that leave


def test_nobody_waits_for_a_worker_that_retired_and_it_can_still_pull() -> None:
    server = Server(bsp(), 2)
    server.push(0, 1, 0, 1.0)
    server.push(0, 2, 1, 1.0, pull=False)
    server.requests.retire(1)
    assert sorted(done.id for _, done in server.answered()) == [1, 2]
    server.pull(1, 3, 0)
    assert server.answered() == [(1, Done(3, version=2))]
    assert server.seen(1) == 2.0


def test_nobody_waits_for_a_paused_worker_which_resumes_at_the_next_round() -> None:
    server = Server(bsp(), 2)
    server.push(0, 1, 0, 1.0)
    server.requests.pause(1)
    server.push(0, 2, 1, 1.0)
    assert sorted(done.id for _, done in server.answered()) == [1, 2]
    server.requests.resuming.add(1, 5, [])
    assert server.resumed == [(1, 5, {0: 2})]
    server.push(0, 3, 2, 1.0)
    assert server.answered() == [], "it is waited for again"
    server.push(1, 1, 2, 10.0)
    assert sorted((worker, done.id, done.version) for worker, done in server.answered()) == [(0, 3, 3), (1, 1, 3)]
    assert server.seen(1) == 13.0


def test_a_paused_worker_that_dies_or_retired_before_does_not_resume() -> None:
    server = Server(bsp(), 3)
    server.requests.pause(1)
    server.requests.remove(1)
    server.requests.retire(2)
    server.requests.pause(2)
    for gone in (1, 2):
        server.requests.resuming.add(gone, 5, [])
        assert not server.requests.engine.is_active(gone)


def test_workers_that_waited_together_resume_together() -> None:
    """Otherwise the first one could make a round without the others."""
    server = Server(bsp(), 3)
    for worker in range(3):
        server.requests.pause(worker)
    server.requests.resuming.add(0, 5, [0, 1, 2])
    server.requests.resuming.add(1, 5, [0, 1, 2])
    assert server.requests.resuming.missing(0, 5) == [2]
    assert server.resumed == []
    server.requests.remove(2)  # it dies instead
    assert server.resumed == [(0, 5, {0: 0}), (1, 5, {0: 0})]


def test_a_resume_whose_answer_was_lost_does_not_wait_again() -> None:
    """The others may wait for this worker by then."""
    server = Server(bsp(), 2)
    for request in (5, 6):
        server.requests.pause(0)
        server.requests.pause(1)
        server.requests.resuming.add(0, request, [0, 1])
        server.requests.resuming.add(1, request, [0, 1])
    server.requests.pause(0)
    server.requests.resuming.add(1, 6, [0, 1])
    assert [worker for worker, request, _ in server.resumed if request == 6] == [0, 1, 1]


# --- workers that join


def test_a_worker_joins_at_the_next_round_and_others_do_not_wait_for_it_before() -> None:
    server = Server(bsp(), 2)
    server.requests.remove(1)
    server.push(0, 1, 0, 1.0)
    assert server.requests.next_clocks(1) == {0: 1}
    assert not server.requests.join(1, 0, {})
    assert server.requests.join(1, 2, {})
    server.push(0, 2, 1, 1.0)
    assert [done.id for _, done in server.answered()] == [1, 2]
    server.push(0, 3, 2, 1.0)
    assert server.answered() == [], "from clock 2 on it is waited for"
    server.push(1, 1, 2, 10.0)
    assert sorted((worker, done.id, done.version) for worker, done in server.answered()) == [(0, 3, 3), (1, 1, 3)]
    assert server.seen(1) == 13.0


def test_a_worker_that_was_refused_by_another_server_moves_to_a_later_clock() -> None:
    server = Server(bsp(), 2)
    server.requests.remove(1)
    assert server.requests.join(1, 1, {})
    server.push(0, 1, 0, 1.0)
    server.push(0, 2, 1, 1.0)
    assert [done.id for _, done in server.answered()] == [1]
    assert server.requests.join(1, 3, {})
    assert [done.id for _, done in server.answered()] == [2], "nobody waits for the clock that it gave up"


def test_gradients_of_a_group_that_is_gone_are_not_used_when_it_returns() -> None:
    server = Server(gsp([[0, 1], [2]]), 3)
    server.push(0, 1, 0, 100.0)  # waits for worker 1
    server.requests.remove(0)
    server.requests.remove(1)
    assert server.requests.next_clocks(0) == {0: 0}
    assert server.requests.join(0, 0, {})
    server.push(0, 2, 0, 1.0)
    assert server.seen(0) == 1.0


def test_keys_that_are_pushed_less_often_have_a_first_clock_of_their_own() -> None:
    server = Server(ssp(1), 2, num_keys=2)
    for clock in range(5):
        server.push(0, clock, clock, 1.0)
        server.push(1, clock, clock, 1.0)
    server.requests.remove(1)
    assert server.requests.next_clocks(1) == {0: 5, 1: 0}
    assert server.requests.join(1, 6, {1: 0})
    server.answered()
    server.pull(1, 10, 0, keys=[1])
    assert [done.id for _, done in server.answered()] == [10]


@pytest.mark.parametrize("pull", [True, False])
def test_a_worker_that_was_removed_gets_no_answer_and_its_gradient_counts(pull: bool) -> None:
    server = Server(bsp(), 2)
    server.push(1, 1, 0, 10.0, pull=pull)
    assert server.requests.remove(1) == "the change of the view releases nothing"
    server.push(0, 1, 0, 1.0)
    assert [worker for worker, _ in server.answered()] == [0]
    assert server.seen(0) == 11.0
    assert server.requests.waiting.find(1, 1) is None


def test_removing_a_worker_releases_those_who_waited_for_it() -> None:
    server = Server(ssp(0), 2)
    server.push(0, 1, 0, 1.0)
    assert server.requests.remove(1) == "released by a change of the view"
    assert server.answered() == [(0, Done(1, version=1))]


def test_a_push_ahead_of_its_turn_is_dropped_with_the_last_worker_of_its_group() -> None:
    server = Server(asp(), 2)
    server.push(1, 1, 3, 10.0)  # clocks 0 to 2 were lost
    assert server.answered() == []
    server.requests.remove(1)
    server.push(0, 1, 0, 1.0)
    assert server.answered() == [(0, Done(1, version=1))]
    assert server.seen(0) == 1.0
