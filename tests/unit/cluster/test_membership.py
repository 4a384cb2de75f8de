"""The scheduler's state machine: registration, views, barriers. Workers have connections 100, 101, … here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest

from echelon.cluster.membership.members import Send
from echelon.cluster.membership.membership import Membership
from echelon.cluster.membership.stores import MAX_OPEN_STORES
from echelon.cluster.messages import (
    Abort,
    BarrierDone,
    Departure,
    Finish,
    Forbidden,
    Halt,
    Leave,
    Member,
    Refused,
    Register,
    Registered,
    Roster,
    ServersUnused,
    Slice,
    StoreClosed,
    StoreEnded,
    View,
    WorkerExited,
)

Message = TypeVar("Message")

SERVERS_AT = 200
LAUNCHER = 300


def worker(rank: int | None = None, pid: int = 1) -> Register:
    return Register("worker", rank, "host", pid, "")


def server(rank: int | None = None, pid: int = 2) -> Register:
    return Register("server", rank, "host", pid, "tcp://host:1")


def gathered(workers: int, servers: int, stores: int = 5) -> Membership:
    """A running job: worker r on connection 100 + r, server r on 200 + r. All workers have opened some stores."""
    membership = Membership(workers, servers)
    for rank in range(servers):
        membership.register(SERVERS_AT + rank, server(rank))
    for rank in range(workers):
        membership.register(100 + rank, worker(rank))
        for store in range(stores):
            membership.store_opened(100 + rank, store)
    assert membership.running
    return membership


def close(membership: Membership, rank: int, store: int) -> list[Send]:
    """Let a worker of `gathered` close a store."""
    return membership.store_closed(100 + rank, StoreClosed(store, rank))


def sent(sends: list[Send], kind: type[Message]) -> dict[int, Message]:
    """Return the messages of one kind by connection."""
    return {send.to: send.message for send in sends if isinstance(send.message, kind)}


def described(send: Send) -> tuple[int, int, list[int], str, Departure]:
    """Return to whom a view is sent, and its most important fields."""
    view = send.message
    assert isinstance(view, View)
    return send.to, view.number, view.workers, view.reason, view.departure


# --- registration


def test_ranks_by_order_of_arrival() -> None:
    membership = Membership(2, 1)
    assert membership.register(7, worker()) == [Send(7, Registered(0))]
    assert membership.register(5, server()) == [Send(5, Registered(0))]
    assert not membership.running
    last = membership.register(6, worker())
    assert last[0] == Send(6, Registered(1))
    assert membership.running


def test_ranks_given_by_the_launcher_in_any_order() -> None:
    membership = Membership(3, 0)
    ranks = [membership.register(connection, worker(rank))[0].message for connection, rank in ((1, 2), (2, 0), (3, 1))]
    assert ranks == [Registered(2), Registered(0), Registered(1)]


def test_a_process_without_a_rank_gets_the_lowest_free_one() -> None:
    membership = Membership(3, 0)
    membership.register(1, worker(0))
    membership.register(2, worker(2))
    assert membership.register(3, worker())[0] == Send(3, Registered(1))


def test_all_get_the_roster_when_the_last_process_has_registered() -> None:
    membership = Membership(2, 1)
    membership.register(1, worker(1, pid=11))
    membership.register(2, server(0, pid=12))
    sends = membership.register(3, worker(0, pid=13))
    members = [
        Member("server", 0, "host", 12, "tcp://host:1"),
        Member("worker", 0, "host", 13, ""),
        Member("worker", 1, "host", 11, ""),
    ]
    roster = Roster(members, 1, [Slice(0, None, True)])
    assert sends == [Send(3, Registered(0)), Send(1, roster), Send(2, roster), Send(3, roster)]
    assert (membership.running, membership.view) == (True, 1)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (worker(0), "worker rank 0 is taken by worker 0 (pid 1 on host)"),
        (worker(2), "worker rank 2 is out of range; the job has 2 workers"),
        (worker(-1), "worker rank -1 is out of range; the job has 2 workers"),
        (server(), "all 1 servers have already registered"),
        (server(0), "all 1 servers have already registered"),
        (
            Register("scheduler", None, "host", 1, ""),
            "a process of role 'scheduler' cannot register; only workers and servers can",
        ),
    ],
)
def test_a_rejected_registration_has_a_reason_and_changes_nothing(request_: Register, reason: str) -> None:
    membership = Membership(2, 1)
    membership.register(1, worker(0))
    membership.register(2, server(0))
    assert membership.register(3, request_) == [Send(3, Refused(reason))]
    assert membership.member(3) is None
    assert membership.waiting_for() == "worker 1"
    assert membership.lost(3, "closed") == []  # it never was a member
    assert not membership.over
    assert membership.register(4, worker(1))[0] == Send(4, Registered(1))
    assert membership.running


def test_nobody_can_register_after_the_end() -> None:
    membership = gathered(1, 1)
    membership.leave(100, Leave("done"))
    assert membership.register(9, worker()) == [Send(9, Refused("the job is over: all workers have finished"))]


def test_a_repeated_registration_gets_the_same_answer_and_counts_once() -> None:
    membership = Membership(2, 0)
    assert membership.register(1, worker()) == [Send(1, Registered(0))]
    assert membership.register(1, worker()) == [Send(1, Registered(0))]
    assert membership.waiting_for() == "worker 1"
    membership.register(2, worker())
    again = membership.register(2, worker())
    assert again[0] == Send(2, Registered(1))
    assert sent(again, Roster).keys() == {2}


def test_waiting_for_lists_the_missing_processes() -> None:
    membership = Membership(3, 2)
    assert membership.waiting_for() == "worker 0, 1, 2 and server 0, 1"
    membership.register(1, worker(1))
    membership.register(2, server(0))
    membership.register(3, server(1))
    assert membership.waiting_for() == "worker 0, 2"


# --- leaving


def test_a_worker_that_dies_shrinks_the_view() -> None:
    membership = gathered(3, 1)
    sends = membership.lost(101, "its connection closed")
    view = membership.last_view
    assert view is not None
    assert sends == [Send(200, view), Send(100, view), Send(102, view)]
    assert (view.number, view.workers, view.departure) == (2, [0, 2], Departure.DIED)
    assert view.reason == "worker 1 (pid 1 on host) died: its connection closed"
    assert [str(member) for member in view.members] == [
        "server 0 (pid 2 on host)",
        "worker 0 (pid 1 on host)",
        "worker 2 (pid 1 on host)",
    ]
    assert membership.member(101) is None
    assert not membership.over


def test_a_worker_that_leaves_shrinks_the_view() -> None:
    membership = gathered(2, 0)
    (send,) = membership.leave(100, Leave("done"))
    assert described(send) == (101, 2, [1], "worker 0 (pid 1 on host) left: done", Departure.LEFT)
    assert membership.lost(100, "its connection closed") == []  # expected after Leave


def test_a_worker_that_leaves_because_of_an_error_has_failed() -> None:
    membership = gathered(2, 0)
    (send,) = membership.leave(100, Leave("a device is gone", failed=True))
    assert described(send) == (101, 2, [1], "worker 0 (pid 1 on host) failed: a device is gone", Departure.FAILED)


def test_views_are_numbered() -> None:
    membership = gathered(4, 1)
    seen = [sent(membership.lost(100 + rank, "x"), View)[200] for rank in (2, 0, 3)]
    assert [(view.number, view.workers) for view in seen] == [(2, [0, 1, 3]), (3, [1, 3]), (4, [1])]


def test_servers_finish_when_the_last_worker_has_left() -> None:
    membership = gathered(2, 2)
    membership.leave(100, Leave("done"))
    sends = membership.leave(101, Leave("done"))
    assert sent(sends, Finish) == {200: Finish(), 201: Finish()}
    assert (membership.over, membership.failure) == (True, None)
    assert membership.leave(200, Leave("finished")) == []
    assert membership.lost(201, "its connection closed") == []  # expected after the end
    assert membership.failure is None


def test_a_server_that_dies_ends_the_job() -> None:
    membership = gathered(2, 2)
    sends = membership.lost(201, "no message for 10.2 s")
    reason = "server 1 (pid 2 on host) died: no message for 10.2 s"
    assert sends == [Send(to, Abort(reason)) for to in (200, 100, 101)]
    assert (membership.over, membership.failure) == (True, reason)
    assert membership.lost(100, "its connection closed") == []
    assert membership.failure == reason  # the first reason stays


@pytest.mark.parametrize(("connection", "name"), [(1, "worker 0 (pid 1 on host)"), (2, "server 0 (pid 2 on host)")])
def test_a_death_before_the_start_ends_the_job(connection: int, name: str) -> None:
    membership = Membership(2, 1)
    membership.register(1, worker(0))
    membership.register(2, server(0))
    sends = membership.lost(connection, "its connection closed")
    reason = f"{name} died before the job started: its connection closed"
    assert sends == [Send(3 - connection, Abort(reason))]
    assert (membership.over, membership.failure) == (True, reason)
    assert isinstance(membership.register(5, worker(1))[0].message, Refused)


@pytest.mark.parametrize("connection", [1, 2])
def test_leaving_before_the_start_ends_the_job(connection: int) -> None:
    """The job that the others wait for can never start."""
    membership = Membership(2, 1)
    membership.register(1, worker(0))
    membership.register(2, server(0))
    sends = membership.leave(connection, Leave("a bad argument"))
    assert sent(sends, Abort).keys() == {3 - connection}
    assert membership.over
    assert membership.failure is not None
    assert "left before the job started: a bad argument" in membership.failure


def test_a_server_that_leaves_a_running_job_ends_it() -> None:
    """Its part of the weights is lost, even if it left in order."""
    membership = gathered(1, 2)
    assert sent(membership.leave(200, Leave("interrupted")), Abort).keys() == {100, 201}
    assert membership.failure == "server 0 (pid 2 on host) left: interrupted"


def test_unknown_and_removed_connections_are_ignored() -> None:
    membership = gathered(2, 1)
    assert membership.member(999) is None
    assert membership.lost(999, "x") == membership.leave(999, Leave("x")) == membership.barrier(999, 1) == []
    membership.lost(100, "x")
    assert membership.lost(100, "x") == membership.leave(100, Leave("x")) == membership.barrier(100, 1) == []
    assert membership.view == 2


def test_member_returns_the_process_of_a_connection() -> None:
    membership = gathered(1, 1)
    assert membership.member(100) == Member("worker", 0, "host", 1, "")
    assert membership.member(200) == Member("server", 0, "host", 2, "tcp://host:1")


# --- workers that exit before they register


def test_a_worker_that_fails_before_it_registers_ends_the_job() -> None:
    membership = Membership(2, 1)
    membership.register(1, server(0))
    sends = membership.worker_exited(LAUNCHER, WorkerExited(1, "exited with status 2", failed=True))
    assert sends == [Send(1, Abort("worker 1 exited with status 2 before it joined the job"))]
    assert membership.failure == "worker 1 exited with status 2 before it joined the job"


def test_a_worker_that_others_wait_for_ends_the_job_even_if_it_exits_successfully() -> None:
    membership = Membership(2, 0)
    membership.register(1, worker(0))
    assert sent(membership.worker_exited(LAUNCHER, WorkerExited(1, "ended", failed=False)), Abort).keys() == {1}
    assert membership.over


def test_no_worker_can_register_after_another_exited() -> None:
    membership = Membership(2, 0)
    assert membership.worker_exited(LAUNCHER, WorkerExited(1, "ended", failed=False)) == []
    assert membership.register(1, worker(0)) == [Send(1, Refused("worker 1 ended before it joined the job"))]


@pytest.mark.parametrize("server_first", [True, False])
def test_servers_finish_if_no_worker_needs_them(server_first: bool) -> None:
    membership = Membership(2, 1)
    events: list[Callable[[], list[Send]]] = [
        lambda: membership.register(1, server(0)),
        lambda: membership.worker_exited(LAUNCHER, WorkerExited(0, "ended", failed=False)),
        lambda: membership.worker_exited(LAUNCHER, WorkerExited(1, "ended", failed=False)),
    ]
    sends = [send for event in (events if server_first else events[::-1]) for send in event()]
    assert sent(sends, Finish) == {1: Finish()}
    assert (membership.over, membership.failure) == (True, None)


def test_the_exit_of_a_registered_worker_is_left_to_its_connection() -> None:
    gathering = Membership(2, 0)
    gathering.register(1, worker(0))
    assert gathering.worker_exited(LAUNCHER, WorkerExited(0, "ended", failed=True)) == []
    assert gathered(2, 1).worker_exited(LAUNCHER, WorkerExited(0, "ended", failed=True)) == []


# --- workers whose store has no servers

UNUSED = ServersUnused("dist_device_sync")


def test_servers_are_told_that_nobody_uses_them_and_nobody_has_to_register_in_time() -> None:
    membership = Membership(2, 2)
    membership.register(1, server(0))
    limited_before = membership.has_time_limit
    assert membership.servers_unused(100, UNUSED) == [Send(1, UNUSED)]
    assert membership.servers_unused(101, UNUSED) == [], "once is enough"
    assert membership.register(2, server(1)) == [Send(2, Registered(1)), Send(2, UNUSED)]
    assert (limited_before, membership.has_time_limit) == (True, False)
    assert [membership.is_used(connection) for connection in (1, 2, 100, 101, 9)] == [True] * 4 + [False]


def test_servers_finish_when_the_workers_that_do_not_use_them_have_ended() -> None:
    membership = Membership(2, 1)
    membership.register(1, server(0))
    membership.servers_unused(100, UNUSED)
    membership.servers_unused(101, UNUSED)
    assert membership.lost(101, "its connection closed") == []
    assert membership.lost(100, "its connection closed") == [Send(1, Finish())]
    assert (membership.over, membership.failure) == (True, None)


def test_the_time_limit_applies_again_when_only_some_workers_have_ended() -> None:
    membership = Membership(2, 0)
    membership.servers_unused(100, UNUSED)
    assert membership.lost(100, "its connection closed") == []
    assert membership.has_time_limit
    assert not membership.over


def test_a_failed_worker_ends_a_job_whose_servers_nobody_uses() -> None:
    membership = Membership(2, 1)
    membership.register(1, server(0))
    membership.servers_unused(100, UNUSED)
    exited = WorkerExited(1, "exited with status 2", failed=True)
    assert membership.worker_exited(LAUNCHER, exited) == [Send(1, Finish())]
    assert membership.failure == "worker 1 exited with status 2"


def test_a_worker_may_join_a_job_although_it_has_a_store_without_servers() -> None:
    membership = Membership(1, 1)
    membership.servers_unused(100, UNUSED)
    membership.register(1, server(0))
    assert sent(membership.register(2, worker(0)), Roster).keys() == {1, 2}
    assert membership.lost(100, "its connection closed") == []
    assert not membership.over


# --- barriers


def test_a_barrier_ends_when_the_last_worker_reaches_it() -> None:
    membership = gathered(3, 1)
    assert membership.barrier(100, 1) == []
    assert membership.barrier(102, 1) == []
    assert membership.barrier(101, 1) == [Send(to, BarrierDone(1)) for to in (100, 101, 102)]
    assert membership.barrier(101, 2) == []


def test_barriers_follow_each_other() -> None:
    membership = gathered(2, 0)
    for sequence in (1, 2, 3):
        assert membership.barrier(100, sequence) == []
        assert sent(membership.barrier(101, sequence), BarrierDone) == dict.fromkeys((100, 101), BarrierDone(sequence))


def test_a_barrier_does_not_wait_for_a_dead_worker() -> None:
    membership = gathered(3, 1)
    membership.barrier(100, 1)
    membership.barrier(101, 1)
    assert sent(membership.lost(102, "x"), BarrierDone) == dict.fromkeys((100, 101), BarrierDone(1))


def test_a_barrier_does_not_wait_for_a_worker_that_left() -> None:
    membership = gathered(2, 1)
    membership.barrier(100, 1)
    assert sent(membership.leave(101, Leave("done")), BarrierDone) == {100: BarrierDone(1)}


def test_a_dead_worker_that_had_reached_the_barrier_changes_nothing() -> None:
    membership = gathered(3, 0)
    membership.barrier(100, 1)
    assert sent(membership.lost(100, "x"), BarrierDone) == {}
    membership.barrier(101, 1)
    assert sent(membership.barrier(102, 1), BarrierDone).keys() == {101, 102}


def test_a_worker_ahead_waits_at_its_own_barrier() -> None:
    membership = gathered(2, 0)
    membership.barrier(100, 1)
    membership.barrier(101, 1)
    membership.barrier(100, 2)
    assert sent(membership.lost(101, "x"), BarrierDone) == {100: BarrierDone(2)}


def test_a_barrier_waits_for_workers_that_have_not_registered() -> None:
    membership = Membership(2, 0)
    membership.register(1, worker(0))
    membership.store_opened(1, 0)
    assert membership.barrier(1, 1) == []
    membership.register(2, worker(1))
    membership.store_opened(2, 0)
    assert sent(membership.barrier(2, 1), BarrierDone).keys() == {1, 2}


# --- stores


def test_stores_have_barriers_of_their_own() -> None:
    membership = gathered(2, 0)
    membership.barrier(100, 1, store=0)
    assert membership.barrier(101, 1, store=1) == []
    assert sent(membership.barrier(100, 1, store=1), BarrierDone) == dict.fromkeys((100, 101), BarrierDone(1, 1))
    assert sent(membership.barrier(101, 1, store=0), BarrierDone) == dict.fromkeys((100, 101), BarrierDone(1, 0))


def test_a_closed_store_is_announced_and_its_barriers_do_not_wait() -> None:
    membership = gathered(2, 1)
    membership.barrier(100, 1, store=3)
    *told, last = close(membership, 1, 3)
    assert sent(told, StoreClosed) == dict.fromkeys((100, 101, 200), StoreClosed(3, 1))
    assert last == Send(100, BarrierDone(1, 3))
    assert membership.barrier(100, 1, store=4) == [], "worker 1 has not closed this one"


def test_a_store_that_everybody_closed_is_forgotten() -> None:
    membership = gathered(2, 0)
    for store in range(5):
        membership.barrier(100, 1, store)
        close(membership, 0, store)
        close(membership, 1, store)
    assert not membership._stores.with_barriers


@pytest.mark.parametrize(("closed", "departure"), [(False, Departure.DIED), (True, Departure.LEFT)])
def test_a_lost_worker_has_died_unless_its_stores_were_closed(closed: bool, departure: Departure) -> None:
    membership = gathered(2, 1, stores=2)
    close(membership, 0, 0)
    assert membership.num_open_stores(100) == 1
    if closed:
        close(membership, 0, 1)
    assert sent(membership.lost(100, "its connection closed"), View)[101].departure is departure


def test_a_worker_that_ends_is_not_waited_for_and_is_told_when_all_have_ended() -> None:
    membership = gathered(3, 1)
    assert membership.store_ending(100, 2) == []
    membership.barrier(101, 1, store=2)
    assert sent(membership.barrier(102, 1, store=2), BarrierDone).keys() == {100, 101, 102}
    assert sent(membership.store_ending(101, 2), StoreEnded) == {}
    assert sent(close(membership, 2, 2), StoreEnded) == dict.fromkeys((100, 101), StoreEnded(2))


def test_a_dead_worker_ends_the_wait_for_it() -> None:
    membership = gathered(2, 0)
    membership.store_ending(100, 0)
    assert sent(membership.lost(101, "x"), StoreEnded) == {100: StoreEnded(0)}


# --- halt


def test_halt_reaches_every_worker_and_no_server() -> None:
    membership = gathered(2, 2)
    halt = Halt("accuracy 0.95 is reached")
    assert membership.halt(101, halt) == [Send(100, halt), Send(101, halt)]
    membership.lost(100, "x")
    assert membership.halt(101, halt) == [Send(101, halt)]


# --- messages that their sender must not send

Act = Callable[[Membership], object]
FORBIDDEN: list[tuple[Act, str]] = [
    (lambda m: m.barrier(200, 1), "only workers send"),
    (lambda m: m.store_opened(200, 0), "only workers send"),
    (lambda m: m.halt(200, Halt("stop")), "only workers send"),
    (lambda m: m.barrier(100, 1, store=5), "it uses store 5, which it has not opened or has closed"),
    (lambda m: m.store_ending(100, 5), "it uses store 5"),
    (lambda m: close(m, 0, 5), "it uses store 5"),
    (lambda m: m.halt(100, Halt("stop", 5)), "it halts store 5, which it has not opened"),
    (lambda m: m.barrier(100, 2), "it reaches barrier 2 after barrier 0"),
    (lambda m: m.barrier(100, 1 << 50), "after barrier 0"),
    (lambda m: m.store_opened(100, 7), "it opens store 7, but its next one is store 5"),
    (lambda m: m.store_opened(100, 0), "its next one is store 5"),
    (lambda m: m.store_closed(100, StoreClosed(1, 1)), "it closes store 1 of worker 1, but is worker 0"),
    (lambda m: m.servers_unused(100, UNUSED), "on the connection that it registered"),
    (lambda m: m.worker_exited(100, WorkerExited(1, "ended", failed=True)), "which only launchers do"),
    (lambda m: m.worker_exited(LAUNCHER, WorkerExited(2, "ended", failed=True)), "the job has 2 workers"),
]


@pytest.mark.parametrize(("act", "error"), FORBIDDEN)
def test_a_forbidden_message_changes_nothing(act: Act, error: str) -> None:
    membership = gathered(2, 1)
    with pytest.raises(Forbidden, match=error):
        act(membership)
    assert (membership.view, membership.over) == (1, False)
    assert membership.num_open_stores(100) == 5
    assert membership.barrier(100, 1) == []
    assert sent(membership.barrier(101, 1), BarrierDone) == dict.fromkeys((100, 101), BarrierDone(1))
    assert membership.store_opened(100, 5) == []


def test_a_worker_cannot_open_stores_without_end() -> None:
    membership = gathered(1, 0, stores=MAX_OPEN_STORES)
    with pytest.raises(Forbidden, match=f"although {MAX_OPEN_STORES} are open: close some"):
        membership.store_opened(100, MAX_OPEN_STORES)
    close(membership, 0, 0)
    membership.store_opened(100, MAX_OPEN_STORES)


def test_a_halt_of_a_store_that_the_worker_has_closed_is_ignored() -> None:
    membership = gathered(2, 0)
    close(membership, 0, 1)
    assert membership.halt(100, Halt("stop", 1)) == []


def test_each_worker_announces_a_store_without_servers_once() -> None:
    """More announcements than workers would look as if all workers had ended."""
    membership = Membership(2, 1)
    for connection in (100, 101):
        membership.servers_unused(connection, UNUSED)
    with pytest.raises(Forbidden, match="as all 2 workers have"):
        membership.servers_unused(102, UNUSED)
    with pytest.raises(Forbidden, match="it registers on the connection that announced"):
        membership.register(100, worker(0))


def test_a_departure_completes_many_barriers_with_one_message() -> None:
    membership = gathered(2, 0)
    for sequence in range(1, 10_000):
        membership.barrier(100, sequence)
    assert [send for send in membership.lost(101, "x") if send.to == 100][1:] == [Send(100, BarrierDone(9_999))]


def test_a_defect_of_the_result_is_kept_if_a_process_of_the_job_reports_it() -> None:
    membership = gathered(2, 1)
    assert membership.add_defect(SERVERS_AT, "key 'w' has NaN") == []
    assert membership.add_defect(100, "the disk is full") == []
    assert membership.add_defect(LAUNCHER, "a stranger's") == []
    assert membership.defects == ["key 'w' has NaN", "the disk is full"]
    assert membership.failure is None
