"""Kills, cuts, joins, returns and restarts of the scheduler in any order: members, slices and barriers stay right."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from membership_world import Process, World

from echelon.cluster.membership.rules import Rules
from echelon.cluster.messages import SERVER, WORKER, Leaving, SliceInSync, StoreClosed, StoreJoined

RULES = st.builds(
    Rules,
    max_workers=st.sampled_from([None, 4]),
    replicas=st.sampled_from([1, 1, 0]),
    can_restart=st.sampled_from([True, True, True, False]),  # otherwise most jobs are over soon
)
MAX_STORES = 2
MAX_PROCESSES = 16
pick = st.integers(0, 1 << 16)


class MembershipMachine(RuleBasedStateMachine):
    """Each rule is one event of one process, of the network or of the scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.world: World

    @initialize(workers=st.integers(1, 3), servers=st.sampled_from([2, 3, 1, 0]), rules=RULES)
    def start(self, workers: int, servers: int, rules: Rules) -> None:
        self.world = World(workers, servers, rules)
        assert self.world.membership.running
        for process in list(self.world.living.values()):
            if process.role == WORKER:
                self.world.open_store(process)

    def one(self, number: int, condition: Callable[[Process], bool]) -> Process | None:
        """Return one of the living processes that fulfil a condition."""
        found = [p for p in self.world.processes if p.is_alive and not p.is_over and condition(p)]
        return found[number % len(found)] if found else None

    def a_store(self, number: int) -> tuple[Process, int] | None:
        """Return one of the open stores of a worker that has joined."""
        found = [(p, n) for p in self.world.processes if p.can_act for n in p.stores if not p.waits_for_position(n)]
        return found[number % len(found)] if found else None

    @property
    def is_over(self) -> bool:
        return self.world.membership.over

    # --- processes end

    @precondition(lambda self: not self.is_over)
    @rule(number=pick)
    def kill(self, number: int) -> None:
        if (process := self.one(number, lambda p: True)) is None:
            return
        process.is_alive = False
        if process.can_send:  # the kernel closes its connection
            self.world.lose(process)

    @precondition(lambda self: not self.is_over)
    @rule(number=pick, failed=st.booleans())
    def leave(self, number: int, failed: bool) -> None:
        process = self.one(number, lambda p: p.role == WORKER and p.can_act and p.can_send)
        others = [p for p in self.world.living.values() if p.role == WORKER and p is not process]
        if process is not None and others:
            self.world.leave(process, failed=failed)

    @precondition(lambda self: not self.is_over)
    @rule(number=pick)
    def announce_leaving(self, number: int) -> None:
        if (process := self.one(number, lambda p: p.role == WORKER and p.can_act)) is not None:
            self.world.send(process, Leaving("SIGTERM"))

    # --- the network

    @precondition(lambda self: not self.is_over)
    @rule(number=pick)
    def cut(self, number: int) -> None:
        if (process := self.one(number, lambda p: p.can_send)) is not None:
            process.is_cut = True

    @precondition(lambda self: not self.is_over)
    @rule(number=pick)
    def deafen(self, number: int) -> None:
        if (process := self.one(number, lambda p: p.is_connected)) is not None:
            process.is_deaf = True

    @precondition(lambda self: not self.is_over)
    @rule(number=pick)
    def notice_silence(self, number: int) -> None:
        silent = [p for p in self.world.processes if p.connection and not p.is_connected]
        if silent:
            self.world.lose(silent[number % len(silent)])

    @precondition(lambda self: not self.is_over)
    @rule(number=pick)
    def come_back(self, number: int) -> None:
        if (process := self.one(number, lambda p: not p.is_connected)) is not None:
            self.world.connect(process)

    @precondition(lambda self: not self.is_over)
    @rule(order=st.randoms(use_true_random=False))
    def all_come_back(self, order: Random) -> None:
        away = [p for p in self.world.processes if p.is_alive and not p.is_over and not p.is_connected]
        order.shuffle(away)
        for process in away:
            self.world.connect(process)

    @precondition(lambda self: not self.is_over)
    @rule(number=pick)
    def rejoin(self, number: int) -> None:
        if (process := self.one(number, lambda p: p.is_removed and p.has_joined)) is not None:
            self.world.rejoin(process)

    # --- joins, and the scheduler

    @precondition(lambda self: not self.is_over and len(self.world.processes) < MAX_PROCESSES)
    @rule(role=st.sampled_from([WORKER, SERVER]), rank=st.sampled_from([None, None, 0, 1, 3]))
    def join(self, role: str, rank: int | None) -> None:
        self.world.add(role, rank)

    @precondition(lambda self: not self.is_over and self.world.num_restarts < 2)
    @rule()
    def restart_scheduler(self) -> None:
        self.world.restart_scheduler()

    @precondition(lambda self: not self.is_over)
    @rule(seconds=st.sampled_from([0.1, 1.0, 7.0]))
    def pass_time(self, seconds: float) -> None:
        self.world.tick(seconds)

    # --- stores and slices

    @precondition(lambda self: not self.is_over)
    @rule(number=pick)
    def open_store(self, number: int) -> None:
        if (process := self.one(number, _can_open)) is not None:
            self.world.open_store(process)

    @precondition(lambda self: not self.is_over)
    @rule(number=pick)
    def reach_barrier(self, number: int) -> None:
        if (found := self.a_store(number)) is None:
            return
        process, store = found[0], found[0].stores[found[1]]
        if store.takes_part and not store.ending and store.done >= store.awaited:
            self.world.reach(process, found[1])

    @precondition(lambda self: not self.is_over)
    @rule(number=pick)
    def join_store(self, number: int) -> None:
        if (found := self.a_store(number)) is None:
            return
        process, store = found[0], found[0].stores[found[1]]
        if store.is_late and not store.ending:  # again, if an earlier answer is still missing
            store.joining = True
            self.world.send(process, StoreJoined(found[1]))

    @precondition(lambda self: not self.is_over)
    @rule(number=pick, closes=st.booleans())
    def end_store(self, number: int, closes: bool) -> None:
        if (found := self.a_store(number)) is None:
            return
        process, number = found
        if process.stores[number].joining:
            return  # the thread waits for the scheduler's answer
        if not closes:
            self.world.end(process, number)
        else:
            del process.stores[number]
            assert process.rank is not None
            self.world.send(process, StoreClosed(number, process.rank))

    @precondition(lambda self: not self.is_over and not self.world.membership.is_rebuilding)
    @rule(number=pick)
    def fill_backup(self, number: int) -> None:
        slices = self.world.membership.slices
        empty = [(n, one) for n, one in enumerate(slices) if one.backup is not None and not one.in_sync]
        if not empty or not self.world.membership.running:
            return
        n, one = empty[number % len(empty)]
        assert one.primary is not None
        assert one.backup is not None
        primary, backup = self.world.server(one.primary), self.world.server(one.backup)
        knows = primary.slices[n].backup == one.backup and backup.member() in primary.members
        # Of a copy whose primary is cut off the scheduler knows nothing: without the primary, the slice counts as lost.
        if knows and primary.is_alive and primary.can_send and backup.is_alive:
            primary.synced.add(n)
            self.world.holders[n].add(backup.token)
            self.world.send(primary, SliceInSync(n, one.backup))

    @precondition(lambda self: self.is_over)
    @rule()
    def nothing_happens_after_the_end(self) -> None:
        assert self.world.dispatch.tick(self.world.now + 1000) == []

    # --- what holds after every event

    @property
    def _judges(self) -> bool:
        membership = self.world.membership
        return membership.running and not membership.over and not membership.is_rebuilding

    @invariant()
    def the_members_are_those_that_live(self) -> None:
        if self._judges:
            members = {member.token for member in self.world.membership.members}
            assert members == self.world.living.keys()
            ranks = [(member.role, member.rank) for member in self.world.membership.members]
            assert len(ranks) == len(set(ranks)), "a rank has two processes"

    @invariant()
    def all_that_are_connected_know_the_view(self) -> None:
        membership = self.world.membership
        if not self._judges:
            return
        assert membership.last_view is not None
        assert membership.last_view.members == membership.members
        for process in self.world.living.values():
            if process.is_connected and process.is_alive and process.has_joined and not process.is_removed:
                assert (process.view, process.members) == (membership.view, membership.members)
                assert process.slices == membership.slices

    @invariant()
    def a_slice_is_served_by_a_server_that_has_it(self) -> None:
        if not self._judges:
            return
        for number, one in enumerate(self.world.membership.slices):
            holders = self.world.holders[number] & self.world.living.keys()
            if one.primary is not None:
                assert self.world.server(one.primary).token in holders, f"slice {number}"
            elif not self.world.num_restarts:
                assert not holders, f"slice {number} has no primary, although a server has all of it"
            if one.backup is not None:
                assert one.backup != one.primary
                assert not one.in_sync or self.world.server(one.backup).token in holders

    @invariant()
    def barriers_do_not_wait_for_nobody(self) -> None:
        if not self._judges or not all(p.is_connected for p in self.world.living.values()):
            return
        workers = [p for p in self.world.living.values() if p.role == WORKER]
        for number in range(MAX_STORES):
            waiting = [p.stores[number] for p in self.world.participants(number)]
            num_done = max((store.done for store in waiting), default=0)
            if any(p.num_opened <= number and not (p.is_late and num_done) for p in workers):
                continue  # it will open the store
            reached = min((store.reached for store in waiting if not store.ending), default=0)
            # A late worker is not told of the barriers that were complete before it took part, or waited for the end.
            assert all(s.ending or s.done >= min(reached, s.awaited) for s in waiting), f"store {number}: {waiting}"
            if waiting and all(store.ending for store in waiting):
                assert all(store.ended for store in waiting)

    @invariant()
    def late_workers_are_answered(self) -> None:
        if not self._judges:
            return
        for process in self.world.living.values():
            if process.role == WORKER and process.can_act and process.is_connected:
                for number, store in process.stores.items():
                    assert not process.waits_for_position(number), f"{process.name} waits to open store {number}"
                    assert not store.joining, f"{process.name} waits to take part in store {number}"

    @invariant()
    def a_job_is_over_only_for_a_reason(self) -> None:
        membership = self.world.membership
        if membership.over and membership.failure is None:
            assert not membership.workers


def _can_open(process: Process) -> bool:
    waits = any(process.waits_for_position(number) for number in process.stores)
    return process.role == WORKER and process.can_act and process.num_opened < MAX_STORES and not waits


@pytest.mark.parametrize("examples", [150, pytest.param(3000, marks=[pytest.mark.long, pytest.mark.timeout(600)])])
def test_membership_against_a_naive_model(examples: int) -> None:
    run_state_machine_as_test(
        MembershipMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=60,
            deadline=None,
            derandomize=True,  # the same examples in every run; without it, and with other numbers, others by hand
            suppress_health_check=list(HealthCheck),
        ),
    )
