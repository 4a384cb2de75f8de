"""Changes of a running job: joins, returns, lost servers, too few workers, workers that are told to leave, restarts."""

from __future__ import annotations

import pytest
from test_membership import SERVERS_AT, close, gathered, sent, worker

from echelon.cluster.membership.leaving import GATHER_S
from echelon.cluster.membership.members import Send
from echelon.cluster.membership.membership import Membership
from echelon.cluster.membership.rules import RESTART_S, Rules
from echelon.cluster.messages import (
    Abort,
    BarrierDone,
    Departure,
    Finish,
    Forbidden,
    Halt,
    Leave,
    MayLeave,
    Member,
    Refused,
    Register,
    Registered,
    Removed,
    Return,
    Roster,
    Slice,
    SliceInSync,
    StoreClosed,
    StoreEnded,
    StoreIsAt,
    StoreProgress,
    StoreState,
    View,
)

NEW = 50  # a connection


def running(workers: int, servers: int, rules: Rules, stores: int = 1) -> Membership:
    """A running job like that of `gathered`, whose processes have the tokens w0, w1, … and s0, s1, …"""
    membership = Membership(workers, servers, rules)
    for rank in range(servers):
        membership.register(SERVERS_AT + rank, Register("server", rank, "host", 2, f"tcp://host:{rank}", f"s{rank}"))
    for rank in range(workers):
        membership.register(100 + rank, Register("worker", rank, "host", 1, "", f"w{rank}"))
        for store in range(stores):
            membership.store_opened(100 + rank, store)
    assert membership.running
    return membership


def view_of(sends: list[Send], connection: int) -> View:
    """Return the last view that a connection gets."""
    views = [send.message for send in sends if send.to == connection and isinstance(send.message, View)]
    return views[-1]


def returning(membership: Membership, token: str, *states: StoreState, num_opened: int = 0) -> Return:
    """What a member of a job reports that has received its last view."""
    view = membership.last_view
    assert view is not None
    member = next(member for member in view.members if member.token == token)
    return Return(member, view.number, view.members, view.slices, list(states), [], num_opened, view.outcome)


# --- joining


def test_a_worker_joins_a_running_job_after_another_one_died() -> None:
    membership = running(2, 1, Rules())
    membership.barrier(100, 1)
    membership.barrier(101, 1)
    membership.lost(101, "x")
    sends = membership.register(NEW, Register("worker", 1, "host", 7, "", "again"))
    assert sends[0] == Send(NEW, Registered(1))
    roster = sent(sends, Roster)[NEW]
    assert (roster.late, roster.view, roster.stores) == (True, 3, [StoreProgress(0, 1)])
    view = view_of(sends, 100)
    assert (view.number, view.workers, view.departure) == (3, [0, 1], Departure.JOINED)
    assert view.reason == "worker 1 (pid 7 on host) joined"
    assert roster.members == view.members
    assert sent(sends, View).keys() == {100, SERVERS_AT}, "the roster says it to the new one"


@pytest.mark.parametrize(("max_workers", "rank", "answer"), [(3, None, 2), (3, 2, 2), (4, 3, 3), (None, None, None)])
def test_more_workers_join_up_to_a_limit(max_workers: int | None, rank: int | None, answer: int | None) -> None:
    membership = running(2, 1, Rules(max_workers=max_workers))
    first = membership.register(NEW, worker(rank, pid=9))[0].message
    full = "all 2 workers have already registered; start the job with a higher --max-workers than 2"
    assert first == (Registered(answer) if answer is not None else Refused(full))


def test_a_repeated_registration_on_another_connection_is_the_same_process() -> None:
    """The answer to the first one was lost with its connection."""
    membership = running(2, 0, Rules())
    membership.lost(101, "x")
    request = Register("worker", 1, "host", 7, "", "again")
    membership.register(NEW, request)
    sends = membership.register(NEW + 1, request)
    assert sends[0] == Send(NEW + 1, Registered(1))
    assert sent(sends, Roster).keys() == {NEW + 1}
    assert (membership.view, membership.workers, membership.member(NEW)) == (3, [0, 1], None)


def test_a_worker_that_has_finished_cannot_join_again() -> None:
    membership = running(2, 0, Rules())
    membership.leave(101, Leave("it finished"))
    assert membership.register(NEW, worker(1)) == [Send(NEW, Refused("worker 1 (pid 1 on host) has left the job"))]


def test_barriers_do_not_wait_for_a_late_worker_until_it_takes_part() -> None:
    membership = running(2, 0, Rules(max_workers=3))
    for connection in (100, 101):
        membership.barrier(connection, 1)
    membership.register(NEW, worker(2))
    membership.barrier(100, 2)
    assert sent(membership.barrier(101, 2), BarrierDone).keys() == {100, 101}, "it has not opened the store"
    assert membership.store_opened(NEW, 0) == [Send(NEW, StoreIsAt(0, 2, False))]
    membership.barrier(100, 3)
    assert membership.store_joined(NEW, 0) == [Send(NEW, StoreIsAt(0, 3, True))], "barrier 3 has begun without it"
    assert sent(membership.barrier(101, 3), BarrierDone).keys() == {100, 101, NEW}
    membership.barrier(100, 4)
    assert membership.barrier(101, 4) == []
    assert sent(membership.barrier(NEW, 4), BarrierDone).keys() == {100, 101, NEW}


@pytest.mark.parametrize("closed", [False, True])
def test_a_worker_that_comes_after_all_have_died_is_late(closed: bool) -> None:
    membership = running(2, 1, Rules(can_restart=True))
    membership.has_ledger = True
    for connection in (100, 101):
        membership.barrier(connection, 1)
    if closed:
        for rank in (0, 1):
            membership.store_closed(100 + rank, StoreClosed(0, rank))
    for connection in (100, 101):
        membership.lost(connection, "x")
    if closed:
        assert not membership._stores.with_barriers
        return
    membership.register(NEW, Register("worker", 0, "host", 7, "", "again"))
    assert membership.store_opened(NEW, 0) == [Send(NEW, StoreIsAt(0, 1, False))], "servers have the trained values"
    assert membership.store_joined(NEW, 0) == [Send(NEW, StoreIsAt(0, 1, True))]
    assert sent(membership.barrier(NEW, 2), BarrierDone) == {NEW: BarrierDone(2, 0)}
    membership.store_closed(NEW, StoreClosed(0, 0))
    assert not membership._stores.with_barriers, "its last worker has closed it"


@pytest.mark.parametrize("first", ["server", "worker"])
def test_a_job_that_has_lost_all_workers_and_a_slice_fails(first: str) -> None:
    membership = running(1, 2, Rules(can_restart=True))
    membership.has_ledger = True
    connections = [SERVERS_AT, 100] if first == "server" else [100, SERVERS_AT]
    membership.lost(connections[0], "x")
    failures = [membership.failure]
    membership.lost(connections[1], "x")
    failures.append(membership.failure)
    assert [failure is None for failure in failures] == [True, False], "nobody has the values of the slice any more"


def test_a_late_worker_must_say_that_it_takes_part() -> None:
    membership = running(2, 0, Rules(max_workers=3))
    for connection in (100, 101):
        membership.barrier(connection, 1)
    membership.register(NEW, worker(2))
    membership.store_opened(NEW, 0)
    with pytest.raises(Forbidden, match="it reaches barrier 2 of store 0, in which it does not take part yet"):
        membership.barrier(NEW, 2)


def test_a_late_process_learns_who_has_closed_which_store() -> None:
    membership = running(2, 1, Rules(max_workers=3), stores=2)
    close(membership, 1, 0)
    sends = membership.register(NEW, worker(2))
    assert Send(NEW, StoreClosed(0, 1)) in sends


# --- returning


def test_a_process_continues_on_another_connection() -> None:
    membership = running(2, 1, Rules())
    membership.barrier(101, 1)
    report = returning(membership, "w0", StoreState(0, 1, 0), num_opened=1)
    sends = membership.return_(NEW, report)
    assert sent(sends, View)[NEW] == membership.last_view
    assert sent(sends, BarrierDone).keys() == {NEW, 101}, "it had reached the barrier; the message was lost"
    assert (membership.view, membership.member(100), membership.workers) == (1, None, [0, 1])
    assert membership.lost(100, "its connection closed") == []


def test_a_process_that_was_removed_is_told_and_may_join_again() -> None:
    membership = running(2, 1, Rules())
    report = returning(membership, "w1")
    membership.lost(101, "no message for 6.1 s")
    assert membership.return_(NEW, report) == [
        Send(NEW, Removed(2, "worker 1 (pid 1 on host) died: no message for 6.1 s"))
    ]
    sends = membership.register(NEW, Register("worker", 1, "host", 1, "", "again"))
    assert view_of(sends, 100).departure is Departure.RETURNED


def test_what_a_process_did_without_a_connection_counts() -> None:
    membership = running(2, 1, Rules(), stores=2)
    states = [StoreState(1, 0, 0, halted="the target is reached")]
    sends = membership.return_(NEW, returning(membership, "w0", *states, num_opened=2))
    assert sent(sends, StoreClosed)[101] == StoreClosed(0, 0)
    assert sent(sends, Halt)[101] == Halt("the target is reached", 1)
    assert membership.num_open_stores(NEW) == 1


def late(membership: Membership, rank: int) -> None:
    """Let a late worker join, on NEW, and open store 0."""
    membership.register(NEW, Register("worker", rank, "host", 7, "", "late"))
    membership.store_opened(NEW, 0)


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_late_worker_that_waits_for_the_end_still_does_after_it_returned(is_restarted: bool) -> None:
    """It has never taken part, so its report says that it does not."""
    membership = running(2, 0, Rules(max_workers=3))
    for connection in (100, 101):
        membership.barrier(connection, 1)
    late(membership, 2)
    for connection in (100, 101):
        membership.store_ending(connection, 0)
    report = returning(membership, "late", StoreState(0, 0, 1, ending=True, takes_part=False), num_opened=1)
    if is_restarted:
        others = [returning(membership, f"w{i}", StoreState(0, 1, 1, ending=True), num_opened=1) for i in (0, 1)]
        membership = restarted(membership, Rules())
        for connection, one in enumerate(others):
            membership.return_(connection, one)
    assert NEW + 1 in sent(membership.return_(NEW + 1, report), StoreEnded)


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_late_worker_that_returns_before_the_first_barrier_takes_part(is_restarted: bool) -> None:
    """It has opened the store, and lost its connection before the scheduler said whether it is late for it."""
    membership = running(1, 0, Rules(max_workers=2))
    late(membership, 1)
    report = returning(membership, "late", StoreState(0, 0, 0, takes_part=False), num_opened=1)
    if is_restarted:
        other = returning(membership, "w0", StoreState(0, 0, 0), num_opened=1)
        membership = restarted(membership, Rules())
        membership.return_(100, other)
    sends = membership.return_(NEW + 1, report)
    assert sent(sends, StoreIsAt)[NEW + 1] == StoreIsAt(0, 0, True)
    assert membership.barrier(100, 1) == []
    assert sent(membership.barrier(NEW + 1, 1), BarrierDone).keys() == {100, NEW + 1}


def test_a_process_that_returned_and_registers_again_is_another_one() -> None:
    """A worker was told that it is removed. The scheduler was killed before it told the others, who list the worker."""
    before = running(2, 0, Rules())
    after = restarted(before, Rules())
    for rank in (0, 1):
        after.return_(rank, returning(before, f"w{rank}", StoreState(0, 0, 0), num_opened=1))
    sends = after.register(1, Register("worker", 1, "host", 1, "", "again"))
    roster = sent(sends, Roster)[1]
    assert (roster.late, [member.token for member in roster.members]) == (True, ["w0", "again"])
    assert view_of(sends, 0).members == roster.members == after.members
    after.store_opened(1, 0)  # its first one


def test_a_process_that_did_not_receive_the_first_roster_is_not_late() -> None:
    membership = running(2, 1, Rules(), stores=0)
    membership.store_opened(100, 0)
    membership.store_closed(100, StoreClosed(0, 0))
    for connection, request in (
        (NEW, Register("worker", 1, "host", 1, "", "w1")),
        (NEW + 1, Register("server", 0, "host", 2, "tcp://host:0", "s0")),
    ):
        sends = membership.register(connection, request)
        assert not sent(sends, Roster)[connection].late, "the others have not begun without it"
        assert Send(connection, StoreClosed(0, 0)) in sends
    assert membership.store_opened(NEW, 0) == [], "and it does not wait for an answer"


def test_a_late_process_that_did_not_receive_its_roster_is_late() -> None:
    membership = running(2, 0, Rules())
    membership.lost(101, "x")
    request = Register("worker", 1, "host", 7, "", "again")
    assert sent(membership.register(NEW, request), Roster)[NEW].late
    assert sent(membership.register(NEW + 1, request), Roster)[NEW + 1].late


# --- servers


def test_a_backup_takes_over() -> None:
    membership = running(1, 3, Rules(replicas=1, can_restart=True))
    assert membership.slices == [Slice(0, 1, True), Slice(1, 2, True), Slice(2, 0, True)]
    view = view_of(membership.lost(SERVERS_AT + 1, "its connection closed"), 100)
    assert view.slices == [Slice(0, None, True), Slice(2, None, True), Slice(2, 0, True)]
    assert view.reason.endswith("its connection closed; server 2 continues with slice 1")
    view = view_of(membership.register(NEW, Register("server", 1, "host", 9, "tcp://host:9", "again")), 100)
    assert view.slices == [Slice(0, 1, False), Slice(2, 1, False), Slice(2, 0, True)]
    view = view_of(membership.slice_in_sync(SERVERS_AT + 2, SliceInSync(1, 1)), 100)
    assert (view.slices[1], view.departure) == (Slice(2, 1, True), Departure.MOVED)
    assert membership.slice_in_sync(SERVERS_AT, SliceInSync(1, 1)) == [], "it is not the primary"


def test_a_backup_whose_state_differs_does_not_take_over() -> None:
    membership = running(1, 2, Rules(replicas=1, can_restart=True))
    view = view_of(membership.slice_in_sync(SERVERS_AT, SliceInSync(0, 1, in_sync=False)), 100)
    assert view.slices == [Slice(0, None, True), Slice(1, 0, True)]
    membership.lost(SERVERS_AT, "x")
    assert membership.slices[0].primary is None


def test_a_backup_that_is_not_in_sync_does_not_take_over() -> None:
    membership = running(1, 2, Rules(replicas=1, can_restart=True))
    membership.lost(SERVERS_AT, "x")
    membership.register(NEW, Register("server", 0, "host", 9, "tcp://host:9", "again"))
    assert membership.slices == [Slice(1, 0, False), Slice(1, 0, False)]
    membership.lost(SERVERS_AT + 1, "x")
    assert [one.primary for one in membership.slices] == [None, None]
    assert not membership.over


def test_without_restarts_other_servers_become_backups() -> None:
    membership = running(1, 3, Rules(replicas=1))
    membership.lost(SERVERS_AT + 1, "x")
    assert membership.slices == [Slice(0, 2, False), Slice(2, 0, False), Slice(2, 0, True)]


def test_a_job_waits_for_a_new_process_of_a_server_for_a_while() -> None:
    membership = running(1, 2, Rules(can_restart=True))
    view = view_of(membership.lost(SERVERS_AT + 1, "x"), 100)
    assert view.slices == [Slice(0, None, True), Slice(None, None, True)]
    assert membership.tick(10.0) == membership.tick(10.0 + RESTART_S) == []
    (_, (to, abort)) = membership.tick(10.1 + RESTART_S)
    assert to == 100
    assert abort == Abort("no new process of server 1 joined within 60 s, so its values are lost")


def test_a_new_process_of_a_server_takes_its_slice() -> None:
    membership = running(1, 2, Rules(can_restart=True))
    membership.lost(SERVERS_AT + 1, "x")
    membership.tick(10.0)
    sends = membership.register(NEW, Register("server", 1, "host", 9, "tcp://host:9", "again"))
    assert view_of(sends, 100).slices == [Slice(0, None, True), Slice(1, None, True)]
    assert membership.tick(100.0) == membership.tick(200.0) == []


# --- too few workers


def test_a_job_with_too_few_workers_stops_at_once_if_nobody_restarts_them() -> None:
    membership = running(3, 1, Rules(min_workers=2))
    assert not sent(membership.lost(102, "x"), Abort)
    reason = "1 worker is left, and the job needs 2 (--min-workers): worker 1 (pid 1 on host) died: x"
    assert sent(membership.lost(101, "x"), Abort) == dict.fromkeys((100, 200), Abort(reason))


def test_a_job_with_too_few_workers_waits_for_new_ones_if_they_are_restarted() -> None:
    membership = running(2, 1, Rules(min_workers=2, can_restart=True))
    membership.has_ledger = True
    membership.lost(101, "x")
    assert membership.tick(0.0) == []
    membership.register(NEW, worker(1))
    assert membership.tick(RESTART_S + 1) == []
    membership.lost(NEW, "x")
    membership.tick(200.0)
    assert sent(membership.tick(201.0 + RESTART_S), Abort).keys() == {100, 200}


def test_workers_that_finished_are_not_missing() -> None:
    membership = running(2, 1, Rules(min_workers=2))
    membership.leave(100, Leave("it finished"))
    assert sent(membership.leave(101, Leave("it finished")), Finish).keys() == {200}
    assert (membership.failure, membership.defects) == (None, [])


@pytest.mark.parametrize("has_ledger", [False, True])
def test_a_lost_worker_makes_the_result_incomplete_unless_others_train_its_samples(has_ledger: bool) -> None:
    membership = running(2, 1, Rules())
    membership.has_ledger = has_ledger
    membership.lost(100, "x")
    membership.leave(101, Leave("it finished"))
    assert membership.over
    assert membership.failure is None
    assert bool(membership.defects) != has_ledger


def test_a_worker_that_returns_has_lost_one_step() -> None:
    membership = running(2, 1, Rules())
    membership.lost(101, "no message for 6.1 s")
    membership.register(NEW, Register("worker", 1, "host", 1, "", "again"))
    assert membership.defects == [
        "worker 1 (pid 1 on host) was removed for a while, and the step that it was in is lost"
    ]


def test_a_job_whose_workers_are_all_lost_has_failed() -> None:
    membership = gathered(1, 1)
    assert sent(membership.lost(100, "x"), Finish).keys() == {200}
    assert membership.failure == (
        "0 workers are left, and the job needs 1 (--min-workers): worker 0 (pid 1 on host) died: x"
    )


# --- told to leave


def test_a_worker_that_was_told_to_end_may_leave_when_the_others_were_not() -> None:
    membership = running(3, 1, Rules())
    assert membership.leaving(100, "SIGTERM") == []
    assert membership.tick(5.0) == []
    assert membership.tick(5.0 + GATHER_S) == [Send(100, MayLeave())]
    assert membership.tick(9.0) == [], "once"
    assert sent(membership.leave(100, Leave("SIGTERM")), View)[101].workers == [1, 2]


def test_all_stop_together_when_all_were_told_to_end() -> None:
    membership = running(2, 1, Rules(min_workers=2))
    membership.leaving(100, "SIGTERM")
    assert sent(membership.leaving(101, "SIGTERM"), Halt) == dict.fromkeys((100, 101), Halt("SIGTERM"))
    assert membership.tick(1.0) == membership.tick(2.0) == []
    membership.leave(100, Leave("it finished"))
    membership.leave(101, Leave("it finished"))
    assert (membership.over, membership.failure, membership.defects) == (True, None, [])


# --- a scheduler that was started again


def restarted(before: Membership, rules: Rules) -> Membership:
    """A new scheduler of the job."""
    return Membership(before._wanted["worker"], before._wanted["server"], rules)


def test_a_new_scheduler_continues_when_all_members_have_returned() -> None:
    before = running(2, 1, Rules())
    before.barrier(100, 1)
    after = restarted(before, Rules())
    assert after.return_(1, returning(before, "w0", StoreState(0, 1, 0), num_opened=1)) == []
    assert after.return_(2, returning(before, "s0")) == []
    assert (after.is_rebuilding, after.running, after.has_time_limit) == (True, False, False)
    sends = after.return_(3, returning(before, "w1", StoreState(0, 0, 0), num_opened=1))
    assert (after.is_rebuilding, after.running, after.view) == (False, True, 2)
    assert view_of(sends, 1).reason == "the scheduler was started again, and 3 processes returned"
    assert sent(after.barrier(3, 1), BarrierDone).keys() == {1, 3}, "worker 0 had reached it before"


def test_a_new_scheduler_removes_those_that_do_not_return_in_time() -> None:
    before = running(2, 1, Rules())
    before.barrier(100, 1)
    after = restarted(before, Rules(return_s=6.0))
    after.return_(1, returning(before, "w0", StoreState(0, 1, 0), num_opened=1))
    after.return_(2, returning(before, "s0"))
    assert after.tick(0.0) == after.tick(6.0) == []
    sends = after.tick(6.1)
    view = view_of(sends, 1)
    assert (view.number, view.workers, view.departure) == (3, [0], Departure.DIED)
    assert view.reason.endswith("died: it did not return to the scheduler that was started again")
    assert sent(sends, BarrierDone) == {1: BarrierDone(1)}
    assert isinstance(after.return_(9, returning(before, "w1"))[0].message, Removed)


def test_the_newest_view_that_a_process_reports_counts() -> None:
    before = running(3, 0, Rules())
    old = [returning(before, f"w{rank}", num_opened=0) for rank in (1, 2)]
    before.lost(102, "x")
    after = restarted(before, Rules())
    after.return_(2, old[1])
    after.return_(1, old[0])
    sends = after.return_(0, returning(before, "w0"))
    assert after.workers == [0, 1]
    assert sent(sends, Removed).keys() == {2}
    assert after.view == before.view + 1
    assert after.defects == before.defects


def test_processes_that_register_meanwhile_join_the_job_that_is_known_then() -> None:
    before = running(2, 0, Rules())
    before.lost(101, "x")
    after = restarted(before, Rules(is_restarted=True))
    assert after.register(5, Register("worker", 1, "host", 9, "", "again")) == []
    sends = after.return_(1, returning(before, "w0"))
    assert sent(sends, Registered) == {5: Registered(1)}
    assert sent(sends, Roster)[5].late
    assert after.workers == [0, 1]


def test_a_new_job_at_the_address_of_an_earlier_one_does_not_take_its_processes() -> None:
    before = running(2, 0, Rules())
    after = Membership(2, 0)
    after.register(5, worker(0))
    (send,) = after.return_(1, returning(before, "w0"))
    assert isinstance(send.message, Removed)
    assert after.waiting_for() == "worker 1"


def test_a_process_without_a_token_never_replaces_another_one() -> None:
    membership = gathered(2, 0)
    report = Return(Member("worker", 0, "host", 1), 1, membership.members, [])
    assert isinstance(membership.return_(NEW, report)[0].message, Removed)
