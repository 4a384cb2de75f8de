"""Identities between schemes, and the checks of the dials, on the engine alone.

A job is any interleaving of steps (push, then pull, of one worker). Two engines that must be equivalent get the same
job, and their actions are compared.
"""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.errors import UsageError
from echelon.schemes import Apply, Contribution, Decision, Engine, Reply, Rules, asp, bsp, gsp, rules_for, ssp
from echelon.schemes.engine import JOINED, TOO_LATE

WORKERS = 4
EVENT = st.tuples(
    st.sampled_from(["push", "push", "pull", "pull", "again", "leave", "join"]),
    st.integers(0, WORKERS - 1),
    st.sampled_from([1.0, 4.0, 0.0]),
)
EVENTS = st.lists(EVENT, max_size=6) | st.lists(EVENT, min_size=15, max_size=60)
NO_JOIN = EVENTS.map(lambda events: [event for event in events if event[0] != "join"])
Event = tuple[str, int, float]


class Driver:
    """Turns (action, worker, samples) into calls, with the clocks of an ordinary worker."""

    def __init__(self, rules: Rules, workers: int = WORKERS, keys: tuple[int, ...] = (0,)) -> None:
        self.engine = Engine(rules, range(workers))
        self.keys = keys
        for key in keys:
            self.engine.add_key(key)
        self.clocks = {worker: dict.fromkeys(keys, 0) for worker in range(workers)}

    def do(self, what: str, worker: int, samples: float) -> list[Decision]:
        engine, clocks = self.engine, self.clocks[worker]
        if what == "leave":
            return [engine.leave(worker)]
        if what == "join":
            firsts = engine.next_clocks(worker)
            return [] if worker in engine.workers else [self.join(worker, firsts)]
        if what == "pull":
            return [engine.pull(worker, key, clocks[key]) for key in self.keys]
        if what == "again":
            return [engine.push(worker, key, clocks[key] - 1, samples) for key in self.keys if clocks[key]]
        decisions = []
        for key in self.keys:
            decisions.append(engine.push(worker, key, clocks[key], samples))
            clocks[key] += 1
        return decisions

    def join(self, worker: int, firsts: dict[int, int]) -> Decision:
        """Let a worker join at the next clock of each key."""
        self.clocks[worker].update(firsts)
        return self.engine.join(worker, 0, firsts)


def undivided(decisions: list[Decision]) -> list[Decision]:
    """Return the same decisions with divisor 1."""
    return [
        Decision(tuple(a._replace(divisor=1) if isinstance(a, Apply) else a for a in d.actions), d.reason)
        for d in decisions
    ]


@given(EVENTS)
def test_gsp_of_one_group_is_bsp(events: list[Event]) -> None:
    one, other = Driver(gsp([range(WORKERS)])), Driver(bsp())
    for event in events:
        assert one.do(*event) == other.do(*event)  # the divisor too: no other group updates


@given(EVENTS)
def test_gsp_of_singletons_is_asp_with_another_divisor(events: list[Event]) -> None:
    one, other = Driver(gsp([[worker] for worker in range(WORKERS)])), Driver(asp())
    last = dict.fromkeys(range(WORKERS), 0)
    for event in events:
        version = one.engine.version(0)
        joins = event[0] == "join" and event[1] not in one.engine.workers
        grouped, plain = one.do(*event), other.do(*event)
        assert undivided(grouped) == undivided(plain)
        if joins:
            last[event[1]] = version
        for action in (action for decision in grouped for action in decision.actions if isinstance(action, Apply)):
            (part,) = action.contributions
            assert action.divisor == max(1, version - last[part.worker] + 1)
            last[part.worker] = version = version + 1


@given(EVENTS, st.one_of(st.none(), st.integers(100, 10**12)))
def test_a_bound_that_is_never_reached_has_no_effect(events: list[Event], bound: int | None) -> None:
    pairs = [[0, 1], [2, 3]]
    free, bounded = (asp(), ssp(10**9)) if bound is None else (gsp(pairs), gsp(pairs, bound))
    one, other = Driver(free), Driver(bounded)
    for event in events:
        assert one.do(*event) == other.do(*event)


@given(NO_JOIN)  # a new worker joins at the present clock in SSP, at the next one in BSP
def test_ssp_0_answers_like_lock_step(events: list[Event]) -> None:
    """Pulls are answered at the same times as in BSP; only the updates are separate."""
    one, other = Driver(ssp(0)), Driver(bsp())
    for event in events:
        mine, theirs = (
            sorted((a.worker, a.clock) for d in run.do(*event) for a in d.actions if isinstance(a, Reply))
            for run in (one, other)
        )
        assert mine == theirs


@given(NO_JOIN, st.integers(0, 3))
def test_a_bound_holds_pulls_and_never_updates(events: list[Event], bound: int) -> None:
    one, other = Driver(ssp(bound)), Driver(asp())
    for event in events:
        mine, theirs = (
            [
                (a.contributions[0].worker, a.clock, a.version)
                for d in decided
                for a in d.actions
                if isinstance(a, Apply)
            ]
            for decided in (one.do(*event), other.do(*event))
        )
        assert mine == theirs


@pytest.mark.parametrize("rules", [bsp(), asp(), ssp(0), ssp(3), gsp([[0]]), gsp([[0]], 0)])
@given(steps=st.lists(st.sampled_from([1.0, 8.0]), max_size=12))
def test_one_worker_alone_never_waits(rules: Rules, steps: list[float]) -> None:
    driver = Driver(rules, workers=1)
    for clock, samples in enumerate(steps):
        (pushed,) = driver.do("push", 0, samples)
        assert pushed.actions == (Apply(0, clock, (Contribution(0, samples, 0),), 1, clock + 1),)
        (pulled,) = driver.do("pull", 0, samples)
        assert pulled.actions == (Reply(0, 0, clock + 1, clock + 1),)


# --- keys that are decided together


def of_key(decisions: list[Decision], key: int) -> list[object]:
    return [action._replace(key=0) for decision in decisions for action in decision.actions if action.key == key]


@pytest.mark.parametrize("rules", [bsp(), ssp(1), gsp([[0, 1], [2, 3]], 1)], ids=lambda rules: rules.name)
@given(before=EVENTS, after=EVENTS)
def test_keys_that_share_a_state_for_a_while_behave_like_separate_keys(
    rules: Rules, before: list[Event], after: list[Event]
) -> None:
    apart, united = Driver(rules, keys=(0, 1)), Driver(rules, keys=(0, 1))
    united.engine.unite((0, 1), -1)
    united.keys = (-1,)
    for clocks in united.clocks.values():
        clocks[-1] = 0
    for event in before:
        expected = apart.do(*event)
        assert of_key(united.do(*event), -1) == of_key(expected, 0) == of_key(expected, 1)
    united.engine.split(-1, (0, 1))
    united.keys = (0, 1)
    for clocks in united.clocks.values():
        clocks |= dict.fromkeys((0, 1), clocks[-1])
    for event in after:
        expected, done = apart.do(*event), united.do(*event)
        assert [of_key(done, key) for key in (0, 1)] == [of_key(expected, key) for key in (0, 1)]


def test_keys_added_before_and_after_a_worker_joins_differ() -> None:
    engine = Engine(bsp(), [0])
    engine.add_key(0)
    assert engine.untouched(0)
    assert engine.next_clocks(1) == {0: 0}
    assert engine.join(1, 1).reason == JOINED  # it is not expected in round 0 of key 0
    engine.add_key(1)  # but it is in round 0 of key 1
    assert engine.untouched(1)
    assert not engine.untouched(0)


# --- workers that leave or join, examples


def test_a_death_releases_the_pulls_that_it_blocked() -> None:
    engine = Engine(ssp(0), range(3))
    engine.add_key(0)
    for worker in (1, 2):
        engine.push(worker, 0, 0, 1.0)
        assert engine.pull(worker, 0, 1).actions == ()
    assert engine.missing(1, 0, 1) == {0: 0}
    assert engine.leave(0).actions == (Reply(0, 1, 1, 2), Reply(0, 2, 1, 2))


def test_the_push_of_a_dead_worker_counts() -> None:
    engine = Engine(bsp(), range(2))
    engine.add_key(0)
    engine.push(1, 0, 0, 3.0)
    assert engine.leave(1).actions == ()
    (applied,) = engine.push(0, 0, 0, 5.0).actions
    assert applied == Apply(0, 0, (Contribution(0, 5.0, 0), Contribution(1, 3.0, 0)), 1, 1)


# --- the divisor of a push in ASP and SSP


def divisor_of(decision: Decision) -> float:
    (applied,) = decision.actions
    assert isinstance(applied, Apply)
    return applied.divisor


@pytest.mark.parametrize("rules", [asp(), ssp(3)], ids=lambda rules: rules.name)
@given(workers=st.integers(1, 8), rounds=st.integers(1, 3), samples=st.integers(1, 1024))
def test_equal_workers_divide_by_their_number(rules: Rules, workers: int, rounds: int, samples: int) -> None:
    """From the first push on, exactly."""
    driver = Driver(rules, workers)
    for worker in [*range(workers)] * rounds:
        (decision,) = driver.do("push", worker, float(samples))
        assert divisor_of(decision) == workers


@given(batches=st.lists(st.integers(1, 512), min_size=1, max_size=8))
def test_the_steps_of_a_round_add_up_to_one(batches: list[int]) -> None:
    """Each push has the weight that it would have in BSP's mean."""
    driver = Driver(asp(), len(batches))
    for _ in range(2):
        decisions = [driver.do("push", worker, float(samples)) for worker, samples in enumerate(batches)]
    for (decision,), samples in zip(decisions, batches, strict=True):
        assert divisor_of(decision) == sum(batches) / samples


def test_finished_workers_count_and_dead_ones_do_not() -> None:
    engine = Engine(asp(), range(4))
    engine.add_key(0)
    engine.leave(3, finished=True)
    assert divisor_of(engine.push(0, 0, 0, 8.0)) == 4
    engine.leave(1)
    assert divisor_of(engine.push(0, 0, 1, 8.0)) == 3
    engine.join(1, 2)
    assert divisor_of(engine.push(0, 0, 2, 8.0)) == 4


def test_pushes_without_samples_are_not_divided() -> None:
    """They are added in BSP, too."""
    engine = Engine(asp(), range(4))
    engine.add_key(0)
    assert divisor_of(engine.push(0, 0, 0, None)) == 1


def test_mxnets_scale_divides_nothing() -> None:
    for rules in (rules_for("dist_async", None, None, "mxnet"), rules_for("dist_ssync", 3, None, "mxnet")):
        engine = Engine(rules, range(4))
        engine.add_key(0)
        assert divisor_of(engine.push(0, 0, 0, 8.0)) == 1


def test_an_unknown_lr_scale_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="unknown lr_scale 'mxnett'; did you mean 'mxnet'"):
        rules_for("dist_sync", None, None, "mxnett")


def test_a_round_without_samples_is_complete_and_changes_nothing() -> None:
    engine = Engine(bsp(), range(2))
    engine.add_key(0)
    engine.push(0, 0, 0, 0.0)
    done = engine.push(1, 0, 0, 0.0)
    assert (done.actions, done.reason, engine.version(0), engine.clock(0, 0)) == ((), "the round is complete", 0, 1)


def test_a_batch_without_a_gradient_counts_in_the_mean() -> None:
    """In BSP in the round's mean, in ASP in the divisor. A round without any gradient changes nothing."""
    engine = Engine(bsp(), range(2))
    engine.add_key(0)
    engine.push(0, 0, 0, 0.0, 6.0)
    (applied,) = engine.push(1, 0, 0, 2.0).actions
    assert applied == Apply(0, 0, (Contribution(1, 2.0, 0),), 1, 1, 6.0)
    engine.push(0, 0, 1, 0.0, 6.0)
    assert engine.push(1, 0, 1, 0.0, 2.0).actions == ()
    engine = Engine(asp(), range(2))
    engine.add_key(0)
    engine.push(0, 0, 0, 0.0, 6.0)
    assert divisor_of(engine.push(1, 0, 0, 2.0)) == 4


def test_a_worker_that_returns_never_repeats_a_clock() -> None:
    engine = Engine(asp(), range(2))
    engine.add_key(0)
    for clock in range(3):
        engine.push(1, 0, clock, 1.0)
    engine.leave(1)
    assert engine.next_clocks(1) == {0: 3}
    assert engine.join(1, 2).reason == TOO_LATE
    assert engine.join(1, 3).reason == JOINED
    assert engine.push(1, 0, 2, 1.0).actions == ()  # a late copy of a push that was applied before it left
    assert engine.version(0) == 3


def test_nobody_waits_for_a_late_worker_before_its_first_clock() -> None:
    engine = Engine(gsp([[0, 1], [2]], 0), [0, 2])
    engine.add_key(0)
    assert engine.join(1, 1).reason == JOINED
    engine.push(2, 0, 0, 1.0)
    assert engine.pull(2, 0, 1).actions == ()
    assert engine.missing(2, 0, 1) == {0: 0}
    assert [type(action) for action in engine.push(0, 0, 0, 1.0).actions] == [Apply, Reply]


def test_queries_about_a_worker_that_left_are_answered() -> None:
    engine = Engine(asp(), range(2))
    engine.leave(1)
    engine.add_key(0)
    assert engine.clock(1, 0) == 0
    assert engine.missing(1, 0, 4) == {}
    assert engine.pull(1, 0, 4).actions == (Reply(0, 1, 4, 0),)


# --- the dials


def test_groups_are_everybody_alone_or_listed() -> None:
    def groups(rules: Rules) -> list[int]:
        return [rules.group_of(worker) for worker in range(4)]

    assert len(set(groups(bsp()))) == 1
    assert len(set(groups(asp()))) == len(set(groups(ssp(2)))) == 4
    assert groups(gsp([[0, 2], [1, 3]])) == [0, 1, 0, 1]
    assert [rules.sums_over_everybody for rules in (bsp(), asp(), ssp(0), gsp([range(4)]))] == [True] + [False] * 3


@pytest.mark.parametrize(
    ("store", "staleness", "groups", "rules"),
    [
        ("dist_sync", None, None, bsp()),
        ("dist_async", None, None, asp()),
        ("dist_ssync", 3, None, ssp(3)),
        ("dist_gsync", None, [[1, 0], [2]], gsp([[0, 1], [2]])),
        ("dist_gsync", 2, [[0]], gsp([[0]], 2)),
    ],
)
def test_rules_of_a_store(store: str, staleness: int | None, groups: list[list[int]] | None, rules: Rules) -> None:
    assert rules_for(store, staleness, groups) == rules


@pytest.mark.parametrize(
    ("store", "staleness", "groups", "message"),
    [
        ("dist_ssync", None, None, "dist_ssync needs a bound: give staleness=N"),
        ("dist_ssync", -1, None, "staleness must be 0 or more, not -1"),
        ("dist_ssync", 1, [[0]], "dist_ssync has no groups, but groups=[[0]] was given"),
        ("dist_gsync", None, None, "dist_gsync needs groups"),
        ("dist_gsync", None, [], "dist_gsync needs groups"),
        ("dist_gsync", -2, [[0]], "staleness must be 0 or more, not -2"),
        ("dist_sync", 0, None, "dist_sync has no staleness, but staleness=0 was given"),
        ("dist_async", None, [[0]], "dist_async has no groups"),
        ("dist_snyc", None, None, "unknown store 'dist_snyc'; did you mean 'dist_sync'? Choose one of local, device"),
        (
            "dist_device_sync",
            None,
            None,
            "store 'dist_device_sync' does not use servers; the stores that do are dist_sync",
        ),
    ],
)
def test_a_setting_that_does_not_fit_the_store_is_rejected(
    store: str, staleness: int | None, groups: list[list[int]] | None, message: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        rules_for(store, staleness, groups)


@given(st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=4), st.integers(10, 99), st.integers(10, 99))
def test_a_worker_that_no_group_lists_is_a_group_by_itself(groups: list[list[int]], one: int, other: int) -> None:
    rules = gsp(groups)
    listed = {rules.group_of(worker) for group in groups for worker in group}
    assert rules.group_of(one) not in listed
    assert (rules.group_of(one) == rules.group_of(other)) == (one == other)
