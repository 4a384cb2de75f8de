"""Cuts of a ledger: no lease is out while a worker makes a checkpoint, also when the scheduler is lost meanwhile."""

from __future__ import annotations

from echelon.cluster.ledger.ledger import Ledger, ToWorker
from echelon.cluster.ledger.recovery import rebuild
from echelon.cluster.messages import Cut, CutReady, HeldLedger, Lease, OpenLedger

OPENED = OpenLedger(0, 8, 4, 3)


def kinds(sends: list[ToWorker]) -> list[tuple[int, str]]:
    return [(rank, type(message).__name__) for rank, message in sends]


def opened_ledger() -> Ledger:
    ledger = Ledger(OPENED, 1, ())
    for rank in (0, 1):
        ledger.open(rank, OPENED)
    return ledger


def train_epoch(ledger: Ledger, request: int) -> list[ToWorker]:
    """Let worker 1 train an epoch. Return what the last report causes."""
    sends: list[ToWorker] = []
    for number in range(request, request + 2):
        ((_, lease),) = ledger.take(1, number, 0)
        assert isinstance(lease, Lease)
        sends = ledger.trained(1, lease.number, len(lease.batches))
    return sends


def test_a_cut_at_the_end_of_an_epoch_keeps_the_next_one_back() -> None:
    ledger = opened_ledger()
    assert ledger.cut(0, Cut(0, number=1, end_of=0)) == []
    sends = train_epoch(ledger, 1)
    assert (0, "CutReady") in kinds(sends)
    assert ledger.take(1, 3, 0) == []
    assert kinds(ledger.cut(0, Cut(0, number=2))) == [(1, "Lease")]


def test_a_repeated_message_without_a_cut_stops_nobody() -> None:
    """A worker whose cut is over sends it again after a lost connection."""
    ledger = opened_ledger()
    ledger.cut(0, Cut(0, number=1, end_of=0))
    train_epoch(ledger, 1)
    over = Cut(0, number=2)
    for _ in range(2):
        ledger.cut(0, over)
    assert (0, "CutReady") not in kinds(train_epoch(ledger, 3))
    assert kinds(ledger.take(1, 5, 0)) == [(1, "Lease")]


def test_a_cut_at_the_end_of_an_epoch_that_is_over_is_made_at_once() -> None:
    ledger = opened_ledger()
    train_epoch(ledger, 1)
    ((rank, ready),) = ledger.cut(0, Cut(0, number=7, end_of=0))
    assert isinstance(ready, CutReady)
    assert (rank, ready.epoch, ready.number) == (0, 1, 7)


def test_an_answer_that_was_lost_is_given_again() -> None:
    ledger = opened_ledger()
    cut = Cut(0, number=1, now=True)
    assert kinds(ledger.cut(0, cut)) == [(0, "CutReady")]
    assert kinds(ledger.cut(0, cut)) == [(0, "CutReady")]


def test_a_rebuilt_ledger_gives_no_lease_while_a_worker_makes_its_checkpoint() -> None:
    held = {0: HeldLedger(OPENED, 1, [], 0, [], cut=Cut(0, number=1, now=True)), 1: HeldLedger(OPENED, 1, [], 0, [])}
    ledger, sends = rebuild(held, {}, 1, (), {})
    assert kinds(sends) == [(0, "CutReady")]
    assert ledger.take(1, 1, 0) == [], "the request of worker 1 comes first"
    assert kinds(ledger.cut(0, Cut(0, number=2))) == [(1, "Lease")]
