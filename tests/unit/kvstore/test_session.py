"""A worker's membership of a job: late workers, removed workers that join again, and workers that are told to leave.

The scheduler is a real one, in a thread. A worker is removed when its control thread is held up.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest

from echelon.cluster.messages import Barrier, ControlMessage, Departure, Register, StoreOpened, View
from echelon.environment import Job
from echelon.errors import JobError, WorkerRemoved
from echelon.kvstore.create import _listed_groups
from echelon.kvstore.servers.session import Session
from echelon.scheduler import serve
from echelon.transport.in_process import InProcessTransport
from jobs import until

SILENT_S = 1.0
Join = Callable[[int], Session]


@pytest.fixture
def join() -> Iterator[Join]:
    """Workers of a job of two, which may have three."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    job = Job(scheduler_port=port, num_workers=2, max_workers=3, heartbeat_timeout_s=SILENT_S, timeout_s=20.0)
    scheduler = threading.Thread(target=serve, args=(job, listener))
    scheduler.start()
    with ExitStack() as stack:
        stack.callback(scheduler.join)

        def join_job(rank: int) -> Session:
            session = Session(replace(job, rank=rank), InProcessTransport())
            stack.callback(session.leave, "it finished")
            return session

        yield join_job


def in_threads(*actions: Callable[[], object]) -> None:
    """Carry out actions that wait for each other."""
    threads = [threading.Thread(target=action) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def two(join: Join) -> list[Session]:
    sessions: dict[int, Session] = {}
    in_threads(*(lambda rank=rank: sessions.update({rank: join(rank)}) for rank in range(2)))
    return [sessions[0], sessions[1]]


@contextmanager
def held_up(session: Session) -> Iterator[None]:
    """Hold up the thread of a worker's control connection: it sends no heartbeats."""
    with session.changed:
        yield


def remove(session: Session, by: Session) -> None:
    """Let the scheduler remove a worker; `by` sees it."""
    with held_up(session):
        until(lambda: session.rank not in by.workers, "a view without the worker")
    until(lambda: session.removed is not None, "the message that it was removed")


def test_a_view_has_members_and_callbacks(join: Join) -> None:
    first, second = two(join)
    seen: list[View] = []
    first.on_view.append(seen.append)
    assert (first.view, first.workers, first.is_late) == (1, [0, 1], False)
    second.leave("it finished")
    until(lambda: seen, "a view")
    assert (first.view, first.workers, [member.rank for member in first.members]) == (2, [0], [0])
    assert seen[0].departure is Departure.LEFT


def test_groups_contain_workers_that_left_before_this_one_reads_them(join: Join) -> None:
    first, second = two(join)
    second.leave("it finished")
    until(lambda: first.workers == [0], "a view without the other worker")
    assert _listed_groups("0/1", first) == [[0], [1]]


def test_a_late_worker_does_not_hold_up_barriers_and_takes_part_from_then_on(join: Join) -> None:
    first, second = two(join)
    stores = [first.open_store(), second.open_store()]
    assert not stores[0].is_late
    in_threads(stores[0].barrier, stores[1].barrier)
    third = join(2)
    late = third.open_store()
    assert (third.is_late, late.is_late, third.workers) == (True, True, [0, 1, 2])
    in_threads(stores[0].barrier, stores[1].barrier)
    assert until(lambda: first.workers == [0, 1, 2], "the view of all three")
    late.join()
    assert not late.is_late
    waiting = [threading.Thread(target=store.barrier) for store in stores]
    for thread in waiting:
        thread.start()
    waiting[0].join(0.5)
    assert all(thread.is_alive() for thread in waiting), "they wait for the late worker"
    late.barrier()
    for thread in waiting:
        thread.join()


def test_a_late_worker_that_loses_its_connection_while_it_opens_a_store(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not know yet that it is late for the store, and the others must not wait for it."""
    first, second = two(join)
    stores = [first.open_store(), second.open_store()]
    in_threads(stores[0].barrier, stores[1].barrier)
    third = join(2)
    send = third._control.send

    def lose_opening(message: ControlMessage) -> None:
        if isinstance(message, StoreOpened):
            third._control._replace("no message for 1.1 s")
        else:
            send(message)

    monkeypatch.setattr(third._control, "send", lose_opening)
    late = third.open_store()
    assert late.is_late
    in_threads(stores[0].barrier, stores[1].barrier)


def test_a_removed_worker_is_told_and_joins_again(join: Join) -> None:
    first, second = two(join)
    stores = [first.open_store(), second.open_store()]
    in_threads(stores[0].barrier, stores[1].barrier)
    token = second.endpoint_name
    remove(second, by=first)
    with pytest.raises(WorkerRemoved, match=r"the scheduler removed this worker from the job: .*no message for \d"):
        second.check_job()
    seen: list[View] = []
    first.on_view.append(seen.append)
    second.rejoin()
    second.check_job()
    assert second.is_late
    assert second.endpoint_name != token, "it is another process for the servers"
    until(lambda: first.workers == [0, 1], "the view with both")
    assert seen[-1].departure is Departure.RETURNED
    stores[1].join()
    in_threads(stores[0].barrier, stores[1].barrier)


def test_a_removed_worker_that_loses_its_connection_while_it_joins_again(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new process has no store yet. What the earlier one had sent last must not be sent for it."""
    first, second = two(join)
    stores = [first.open_store(), second.open_store()]
    monkeypatch.setattr(stores[1], "returned", lambda: second.send(Barrier(1, 0)))
    remove(second, by=first)
    send = second._control.send

    def lose_registration(message: ControlMessage) -> None:
        if isinstance(message, Register):
            second._control._channel.shutdown()
        else:
            send(message)

    monkeypatch.setattr(second._control, "send", lose_registration)
    second.rejoin()
    until(lambda: first.workers == [0, 1], "the view with both")
    stores[1].join()
    in_threads(stores[0].barrier, stores[1].barrier)


def test_a_removed_worker_whose_rank_was_taken_cannot_join_again(join: Join) -> None:
    first, second = two(join)
    remove(second, by=first)
    other = join(1)
    with pytest.raises(JobError, match="worker rank 1 is taken by worker 1"):
        second.rejoin()
    assert other.workers == [0, 1]


def test_a_worker_that_was_told_to_end_may_leave_and_all_of_them_stop_together(join: Join) -> None:
    first, second = two(join)
    stores = [first.open_store(), second.open_store()]
    first.announce_leaving("SIGTERM")
    until(lambda: first.may_leave, "permission to leave")
    assert stores[1].halted is None
    second.announce_leaving("SIGTERM")
    until(lambda: stores[0].halted and stores[1].halted, "a halt of both")
