"""Epochs of a ledger overlap where they may: no worker waits for the last leases of the others."""

from __future__ import annotations

import pytest
from virtual_workers import VirtualWorkers

from echelon.cluster.ledger.axis import Axis
from echelon.cluster.ledger.ledger import Ledger, ToWorker
from echelon.cluster.messages import Cut, CutReady, Lease, LedgerState, OpenLedger
from echelon.kvstore.leases import EqualLeases

SAMPLES, BATCH = 8, 4


def opened_ledger(opened: OpenLedger) -> Ledger:
    ledger = Ledger(opened, 1, ())
    for rank in (0, 1):
        ledger.open(rank, opened)
    return ledger


def leases_of(sends: list[ToWorker]) -> list[Lease]:
    return [message for _, message in sends if isinstance(message, Lease)]


def take(ledger: Ledger, rank: int, request: int) -> Lease:
    (lease,) = leases_of(ledger.take(rank, request, 0))
    return lease


def test_the_next_epoch_begins_while_the_last_lease_of_the_present_one_is_out() -> None:
    ledger = opened_ledger(OpenLedger(0, SAMPLES, BATCH, 3))
    first, second = take(ledger, 0, 1), take(ledger, 1, 1)
    ledger.trained(1, second.number, 1)
    ahead = take(ledger, 1, 2)
    assert (ahead.epoch, ahead.present, ahead.done) == (1, 0, [(4, 8)])
    ledger.trained(1, ahead.number, 1)
    states = [message for _, message in ledger.trained(0, first.number, 1) if isinstance(message, LedgerState)]
    assert [state.epoch for state in states] == [1, 1]
    last = take(ledger, 1, 3)
    assert (last.epoch, last.present, last.done, last.batches) == (1, 1, ahead.batches, [(4, 8)])


def test_at_most_one_epoch_begins_early() -> None:
    ledger = opened_ledger(OpenLedger(0, SAMPLES, BATCH, 3))
    take(ledger, 0, 1)
    for request in (1, 2, 3):
        lease = take(ledger, 1, request)
        ledger.trained(1, lease.number, 1)
    assert ledger.take(1, 4, 0) == []


@pytest.mark.parametrize(
    "opened", [OpenLedger(0, SAMPLES, BATCH, 3, complete_every=1), OpenLedger(0, SAMPLES, BATCH, 3, lock_step=True)]
)
def test_where_an_epoch_must_be_complete_the_next_one_waits(opened: OpenLedger) -> None:
    ledger = opened_ledger(opened)
    first, second = take(ledger, 0, 1), take(ledger, 1, 1)
    ledger.trained(1, second.number, 1)
    assert ledger.take(1, 2, 1) == []
    (lease,) = leases_of(ledger.trained(0, first.number, 1))
    assert lease.epoch == 1


def test_epochs_overlap_except_after_every_second_one() -> None:
    ledger = opened_ledger(OpenLedger(0, SAMPLES, SAMPLES, 4, complete_every=2))
    first = take(ledger, 0, 1)
    second = take(ledger, 1, 1)
    assert (first.epoch, second.epoch) == (0, 1)
    ledger.trained(0, first.number, 1)
    assert ledger.take(0, 2, 0) == [], "epoch 2 begins after a checkpoint"
    assert [lease.epoch for lease in leases_of(ledger.trained(1, second.number, 1))] == [2]


def test_a_cut_of_two_epochs_resumes_with_the_samples_that_are_left() -> None:
    opened = OpenLedger(0, SAMPLES, BATCH, 2)
    ledger = opened_ledger(opened)
    given_back = take(ledger, 0, 1)
    for request in (1, 2):
        lease = take(ledger, 1, request)
        ledger.trained(1, lease.number, 1)
    ledger.cut(1, Cut(0, number=1, now=True))
    (ready,) = [message for _, message in ledger.give_back(0, given_back.number) if isinstance(message, CutReady)]
    assert (ready.epoch, ready.done) == (0, [(4, 12)])

    resumed = OpenLedger(0, SAMPLES, BATCH, 2, ready.epoch, ready.done)
    ledger = Ledger(resumed, 1, ())
    ledger.open(0, resumed)
    found = []
    for request in (1, 2):
        lease = take(ledger, 0, request)
        found += [(lease.epoch, *batch) for batch in lease.batches]
        ledger.trained(0, lease.number, len(lease.batches))
    assert found == [(0, 0, 4), (1, 4, 8)]
    assert ledger.has_ended

    equal = EqualLeases(resumed, [0], 0)
    parts = [equal.take(wait=True) for _ in range(2)]
    assert [(part.epoch, *part.batches) for part in parts if part is not None] == [(0, (0, 4)), (1, (4, 8))]
    assert equal.take(wait=True) is None


def test_positions_from_a_later_epoch_on() -> None:
    axis = Axis(10)
    assert axis.points(2, [(3, 12), (0, 0)]) == [(23, 32), (0, 0)]
    assert axis.positions(2, [(23, 32)]) == [(3, 12)]
    assert axis.after(1, [(2, 5), (8, 14), (16, 18)]) == [(0, 4), (6, 8)]


@pytest.mark.parametrize(("num_samples", "batch_size", "epochs"), [(1437, 32, 16), (960, 32, 30), (50_000, 128, 1)])
@pytest.mark.parametrize("seconds", [[0.02, 0.02, 0.02, 0.06], [0.02, 0.05], [0.01, 0.013, 0.02, 0.03, 0.04]])
def test_the_whole_time_is_what_the_sum_of_speeds_allows(
    num_samples: int, batch_size: int, epochs: int, seconds: list[float]
) -> None:
    """Beside the 5 % of the target, a job ends with the last step of its slowest worker."""
    workers = VirtualWorkers(OpenLedger(0, num_samples, batch_size, epochs), seconds)
    workers.run()
    num_steps = epochs * -(-num_samples // batch_size)
    assert workers.now <= 1.05 * num_steps / sum(1 / one for one in seconds) + max(seconds)
    assert sum(workers.samples) == num_samples * epochs


def test_an_epoch_ends_for_all_workers_within_a_lease_of_each_other() -> None:
    """The epoch must be complete before the next one begins, as before a checkpoint."""
    seconds = [0.02, 0.02, 0.02, 0.06]
    workers = VirtualWorkers(OpenLedger(0, 1437, 32, 8, complete_every=1), seconds)
    workers.run()
    assert workers.now <= 1.12 * 8 * 45 / sum(1 / one for one in seconds)
