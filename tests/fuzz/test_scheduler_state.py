"""Random messages to the scheduler's state machine, also from processes of the job: it refuses them or handles them."""

from __future__ import annotations

from typing import get_args

from echelon.cluster.membership.membership import Membership
from echelon.cluster.membership.stores import MAX_OPEN_STORES
from echelon.cluster.messages import Forbidden, FromProcess, Register, decode_from_process
from echelon.observe.events import EventLog
from echelon.scheduler.dispatch import Dispatch
from fuzz.messages import MessageSource

WORKERS, SERVERS, CONNECTIONS = 3, 2, 8
STEPS = 30_000


def gathered() -> tuple[Membership, Dispatch]:
    membership = Membership(WORKERS, SERVERS)
    dispatch = Dispatch(membership, EventLog(None, "scheduler", 0), SERVERS)
    for connection in range(WORKERS):
        dispatch.handle(connection, Register("worker", None, "", 1, ""))
    return membership, dispatch


def test_the_state_machine_raises_nothing_but_forbidden() -> None:
    source = MessageSource(get_args(FromProcess), seed=5, wild=0.05)
    random = source.random
    membership, dispatch = gathered()
    handled = forbidden = jobs = 0
    for _ in range(STEPS):
        connection = random.randrange(CONNECTIONS)
        try:
            sends = dispatch.handle(connection, decode_from_process(source.well_formed()))
            handled += 1
        except Forbidden as error:
            forbidden += 1
            sends = membership.lost(connection, str(error)) if random.random() < 0.1 else []
        assert len(sends) <= 2 * CONNECTIONS * (1 + len(membership._stores.with_barriers))
        assert len(membership._stores.with_barriers) <= WORKERS * MAX_OPEN_STORES
        if membership.over:
            jobs += 1
            membership, dispatch = gathered()
    assert min(handled, forbidden, jobs) > 100
