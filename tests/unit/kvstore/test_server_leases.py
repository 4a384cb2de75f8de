"""What a worker sends about cuts, and sends again after its connection to the scheduler was lost."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

from echelon.cluster.messages import Cut, CutReady, LedgerState, OpenLedger
from echelon.kvstore.servers.leases import ServerLeases
from echelon.kvstore.servers.store_session import StoreSession


class Session(SimpleNamespace):
    """A store's session that keeps what is sent."""

    def __init__(self) -> None:
        super().__init__(changed=threading.Condition(), ledger=None, rank=0, num_closed_ledgers=0, num_over_ledgers=0)
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def cuts(self) -> list[Cut]:
        return [message for message in self.sent if isinstance(message, Cut)]


def leases_of(session: Session) -> ServerLeases:
    def nothing() -> None:
        pass

    opened = OpenLedger(0, 100, 10, 6)
    store = cast(StoreSession, session)
    return ServerLeases(opened, store, pause=nothing, join=nothing, survive=lambda wait: wait(), stall_seconds=1.0)


def reach_end(leases: ServerLeases, session: Session) -> None:
    """Ask for a cut at the end of epoch 0, and reach it."""
    leases.request_cut(at_end=True)
    assert session.cuts[-1].end_of == 0
    leases.receive(LedgerState(0, 0, 1))
    leases.receive(CutReady(0, 0, 1, [], number=session.cuts[-1].number))
    assert leases.cut is not None


def test_a_cut_that_is_over_is_not_requested_again() -> None:
    session = Session()
    leases = leases_of(session)
    reach_end(leases, session)
    leases.end_cut()
    session.sent.clear()
    leases.send_again()
    assert [(cut.now, cut.end_of) for cut in session.cuts] == [(False, None)]


def test_a_worker_that_saves_says_so_when_it_returns() -> None:
    session = Session()
    leases = leases_of(session)
    reach_end(leases, session)
    needed = leases.held().cut
    assert needed is not None
    assert (needed.now, needed.end_of) == (True, None)
    session.sent.clear()
    leases.send_again()
    assert session.cuts == [needed]


def test_a_cut_at_the_end_of_an_epoch_is_still_needed_after_one_in_the_middle() -> None:
    session = Session()
    leases = leases_of(session)
    leases.request_cut(at_end=True)
    leases.request_cut()
    leases.receive(CutReady(0, 0, 0, [(0, 10)], number=session.cuts[-1].number))
    leases.end_cut()
    assert [(cut.now, cut.end_of) for cut in session.cuts] == [(False, 0), (True, 0), (False, 0)]


def test_the_answer_to_an_earlier_request_is_ignored() -> None:
    session = Session()
    leases = leases_of(session)
    leases.request_cut()
    first = CutReady(0, 0, 0, [], number=session.cuts[-1].number)
    leases.receive(first)
    leases.end_cut()
    leases.request_cut()
    leases.receive(first)
    assert leases.cut is None
