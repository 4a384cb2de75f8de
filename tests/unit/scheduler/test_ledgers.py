"""When a ledger is over, for workers at different places in their programs, and after a restart of the scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from echelon.cluster.membership.members import Send
from echelon.cluster.membership.membership import Membership
from echelon.cluster.membership.rules import Rules
from echelon.cluster.messages import (
    CloseLedger,
    FromProcess,
    HeldLease,
    HeldLedger,
    HeldSlice,
    Lease,
    Leave,
    Leaving,
    LedgerEnded,
    Member,
    OpenLedger,
    Register,
    Return,
    Slice,
    SliceWork,
    StoreClosed,
    StoreOpened,
    StoreState,
    TakeLease,
    Trained,
)
from echelon.observe.events import EventLog
from echelon.scheduler.dispatch import Dispatch
from echelon.scheduler.ledgers import MAX_OPEN

SERVER = 99  # the connection of the server; those of workers are their ranks
NUM_SAMPLES, BATCH = 12, 2
MEMBERS = [Member("server", 0, "h", 9, "", "s")] + [
    Member("worker", rank, "h", rank + 1, "", f"w{rank}") for rank in (0, 1)
]


class Job:
    """A scheduler without sockets."""

    def __init__(self, events: EventLog, rules: Rules | None = None) -> None:
        self.membership = Membership(2, 1, rules)
        self._dispatch = Dispatch(self.membership, events, 1)
        self._request: dict[tuple[int, int], int] = {}

    def send(self, connection: int, message: FromProcess) -> list[Send]:
        sends = self._dispatch.handle(connection, message)
        return sends + self._dispatch.follow()

    def lose(self, connection: int) -> list[Send]:
        sends = self._dispatch.lost(connection, "it was killed")
        return sends + self._dispatch.follow()

    def register(self, connection: int, rank: int, token: str) -> None:
        self.send(connection, Register("worker", rank, "h", 50, "", token))
        self.send(connection, StoreOpened(0))

    def take(self, connection: int, ledger: int) -> Lease | LedgerEnded | None:
        """Let a worker ask for a lease. Return the answer."""
        number = self._request[connection, ledger] = self._request.get((connection, ledger), 100) + 1
        sends = self.send(connection, TakeLease(0, ledger, number))
        answers = [s.message for s in sends if s.to == connection and isinstance(s.message, Lease | LedgerEnded)]
        return answers[0] if answers else None

    def open(self, connection: int, ledger: int) -> Lease | LedgerEnded | None:
        self.send(connection, opened(ledger))
        return self.take(connection, ledger)

    def train(self, connection: int, ledger: int) -> int:
        """Let a worker train until the ledger has ended or it has to wait. Return the number of its samples."""
        samples = 0
        while isinstance(lease := self.take(connection, ledger), Lease):
            self.send(connection, Trained(0, ledger, lease.number, len(lease.batches)))
            samples += sum(stop - start for start, stop in lease.batches)
        return samples


def opened(ledger: int) -> OpenLedger:
    return OpenLedger(0, NUM_SAMPLES, BATCH, ledger + 1, ledger, ledger=ledger)


@pytest.fixture
def events(tmp_path: Path) -> Iterator[EventLog]:
    with EventLog(tmp_path, "scheduler", 0) as log:
        yield log


@pytest.fixture
def job(events: EventLog) -> Job:
    job = Job(events)
    job.send(SERVER, Register("server", 0, "h", 9, "", "s"))
    for rank in (0, 1):
        job.send(rank, Register("worker", rank, "h", rank + 1, "", f"w{rank}"))
    for rank in (0, 1):
        job.send(rank, StoreOpened(0))
    return job


def restart(events: EventLog, states: list[StoreState], *works: SliceWork) -> Job:
    """Return a scheduler that was started again, to which the workers return with these states."""
    job = Job(events, Rules(is_restarted=True))
    slices = [Slice(0)]
    job.send(SERVER, Return(MEMBERS[0], 4, MEMBERS, slices, held=[HeldSlice(0, True, False, list(works))]))
    for rank, state in enumerate(states):
        job.send(rank, Return(MEMBERS[1 + rank], 4, MEMBERS, slices, [state], num_opened=1))
    assert job.membership.running
    return job


def held(ledger: int, *leases: HeldLease) -> HeldLedger:
    return HeldLedger(opened(ledger), ledger, [], 0, list(leases), answered=len(leases))


def finish_first(job: Job) -> None:
    """Let both workers train ledger 0; worker 1 opens ledger 1."""
    for rank in (0, 1):
        job.send(rank, opened(0))
    assert job.train(1, 0) == NUM_SAMPLES
    for rank in (1, 0):
        job.send(rank, CloseLedger(0, 0))


def test_a_worker_that_ends_its_loop_does_not_end_a_ledger_that_others_have_not_opened(job: Job) -> None:
    finish_first(job)
    assert isinstance(job.open(1, 1), Lease)
    job.send(1, CloseLedger(0, 1))
    job.send(0, opened(1))
    assert job.train(0, 1) == NUM_SAMPLES


def test_a_worker_that_leaves_the_job_does_not_end_a_ledger_that_others_have_not_opened(job: Job) -> None:
    finish_first(job)
    assert isinstance(job.open(1, 1), Lease)
    job.send(1, Leaving("SIGTERM"))
    for message in (CloseLedger(0, 1), StoreClosed(0, 1), Leave("SIGTERM")):
        job.send(1, message)
    job.send(0, opened(1))
    assert job.train(0, 1) == NUM_SAMPLES
    assert not job.membership.defects


def test_a_worker_that_ends_the_next_ledger_does_not_end_the_present_one_of_others(job: Job) -> None:
    assert isinstance(job.open(0, 0), Lease)
    assert isinstance(job.open(1, 0), Lease)
    job.send(1, CloseLedger(0, 0))
    assert isinstance(job.open(1, 1), Lease)
    job.send(1, CloseLedger(0, 1))
    assert isinstance(job.take(0, 0), Lease)


def test_a_ledger_is_over_when_all_workers_have_ended_their_loops(job: Job) -> None:
    for rank in (0, 1):
        job.send(rank, opened(0))
        job.send(rank, CloseLedger(0, 0))
    assert not job.membership.defects, "the program decides how much it trains"
    job.lose(1)
    job.register(2, 1, "later")
    assert isinstance(job.open(2, 0), LedgerEnded)


def test_a_result_is_not_whole_if_the_last_worker_of_a_ledger_was_told_to_end(job: Job) -> None:
    for rank in (0, 1):
        job.open(rank, 0)
    job.send(0, CloseLedger(0, 0))
    job.send(1, Leaving("SIGTERM"))
    job.send(1, CloseLedger(0, 0))
    (defect,) = job.membership.defects
    assert "12 samples of epoch 0 (store 0, ledger 0) were not trained" in defect
    assert "told to end" in defect


def test_a_result_is_not_whole_if_the_last_worker_of_a_ledger_died(job: Job) -> None:
    for rank in (0, 1):
        job.open(rank, 0)
    for message in (CloseLedger(0, 0), StoreClosed(0, 0)):
        job.send(0, message)
    job.send(0, Leave("it finished"))
    assert not job.membership.defects, "worker 1 trains the rest"
    job.lose(1)
    assert job.membership.over
    assert ["was lost" in defect for defect in job.membership.defects] == [True]


def test_workers_go_on_to_many_ledgers_after_the_last_worker_of_one_has_died(job: Job) -> None:
    for rank in (0, 1):
        job.open(rank, 0)
    job.send(0, CloseLedger(0, 0))
    job.lose(1)
    for ledger in range(1, 2 * MAX_OPEN):
        job.send(0, opened(ledger))
        job.send(0, CloseLedger(0, ledger))
    assert ["was lost" in defect for defect in job.membership.defects] == [True]


def test_a_close_that_was_lost_with_the_connection_is_made_up_for(job: Job) -> None:
    first, second = job.open(0, 0), job.open(1, 0)
    assert isinstance(first, Lease)
    assert isinstance(second, Lease)
    job.send(7, Return(MEMBERS[2], 1, MEMBERS, [Slice(0)], [StoreState(0, 0, 0, num_closed_ledgers=1)], num_opened=1))
    job.send(0, Trained(0, 0, first.number, len(first.batches)))
    own = sum(stop - start for start, stop in first.batches)
    assert own + job.train(0, 0) == NUM_SAMPLES, "it gets what the other one had"


def test_a_late_worker_does_not_train_ledgers_again_that_ended_before_the_scheduler_was_started_again(
    job: Job, events: EventLog
) -> None:
    finish_first(job)
    lease = job.open(1, 1)
    assert isinstance(lease, Lease)
    assert lease.num_over == 1
    in_second = StoreState(0, 0, 0, ledger=held(1), num_closed_ledgers=1, num_over_ledgers=lease.num_over)
    job = restart(events, [in_second, in_second])
    job.lose(1)
    job.register(2, 1, "later")
    assert isinstance(job.open(2, 0), LedgerEnded)
    assert isinstance(job.open(2, 1), Lease)


def test_workers_between_two_ledgers_say_that_the_first_is_over(events: EventLog) -> None:
    between = StoreState(0, 0, 0, num_closed_ledgers=2)
    job = restart(events, [between, between])
    job.lose(1)
    job.register(2, 1, "later")
    assert isinstance(job.open(2, 0), LedgerEnded)
    assert isinstance(job.open(2, 1), LedgerEnded)
    assert isinstance(job.open(2, 2), Lease)


def test_a_worker_that_was_told_that_a_ledger_is_over_need_not_be_the_one_that_uses_it(events: EventLog) -> None:
    """Worker 1 is a late worker that passes through the earlier ledgers."""
    in_third = StoreState(0, 0, 0, ledger=held(2), num_closed_ledgers=2, num_over_ledgers=2)
    job = restart(events, [in_third, StoreState(0, 0, 0, ledger=held(0))])
    assert isinstance(job.take(1, 0), LedgerEnded)


def test_a_restarted_scheduler_keeps_a_ledger_for_workers_that_have_not_opened_it(events: EventLog) -> None:
    job = restart(
        events,
        [
            StoreState(0, 0, 0, num_closed_ledgers=1, num_over_ledgers=1),
            StoreState(0, 0, 0, ledger=held(1), num_closed_ledgers=1, num_over_ledgers=1),
        ],
    )
    job.send(1, CloseLedger(0, 1))
    job.send(0, opened(1))
    assert job.train(0, 1) == NUM_SAMPLES


def test_a_ledger_that_only_the_servers_remember_is_not_trained_again(events: EventLog) -> None:
    """Worker 1 has ended ledger 1 early, which worker 0 has not opened."""
    job = restart(
        events,
        [
            StoreState(0, 0, 0, num_closed_ledgers=1, num_over_ledgers=1),
            StoreState(0, 0, 0, num_closed_ledgers=2, num_over_ledgers=1),
        ],
        SliceWork(0, 1, 1, [(0, 8)]),
    )
    job.send(0, opened(1))
    assert job.train(0, 1) == NUM_SAMPLES - 8
