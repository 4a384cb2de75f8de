"""Which method of the state machine handles which message, and what is recorded of it."""

from __future__ import annotations

import sys

from echelon.cluster.membership.members import Send
from echelon.cluster.membership.membership import Membership
from echelon.cluster.messages import (
    WORKER,
    Barrier,
    CloseLedger,
    Cut,
    Departure,
    Forbidden,
    FromProcess,
    GiveBack,
    Halt,
    Heartbeat,
    Leave,
    Leaving,
    NotFinite,
    NotWhole,
    OpenLedger,
    Register,
    Return,
    ServersUnused,
    Settled,
    SliceInSync,
    StoreClosed,
    StoreEnding,
    StoreJoined,
    StoreOpened,
    TakeLease,
    Trained,
    View,
    WorkerExited,
)
from echelon.fault_points import fault_point
from echelon.observe.events import EventLog
from echelon.scheduler.ledgers import Ledgers

MAX_KEPT = 100_000  # messages, while the scheduler waits for the members of the job


class Dispatch:
    """Passes messages to the state machine and writes the events of the job.

    While a scheduler that was started again waits for the members of the job, it keeps their messages.
    """

    def __init__(self, membership: Membership, events: EventLog, num_servers: int) -> None:
        self._membership = membership
        self._events = events
        self._num_servers = num_servers
        self._recorded = 1  # the last view that was written; the first one has no event
        self._kept: list[tuple[int, FromProcess]] = []
        self._ledgers = Ledgers(membership, events)

    def handle(self, number: int, message: FromProcess) -> list[Send]:
        """Handle a message of a connection; return what to send. Raises Forbidden, and then has changed nothing."""
        membership = self._membership
        fault_point(f"scheduler.{type(message).__name__}")
        if membership.is_rebuilding and not isinstance(message, Return | Heartbeat):
            if len(self._kept) >= MAX_KEPT:
                raise Forbidden(f"{MAX_KEPT} messages wait until the members of the job have returned")
            self._kept.append((number, message))
            return []
        match message:
            case Register():
                return self._register(number, message)
            case Return():
                return self._return(number, message)
            case SliceInSync():
                return membership.slice_in_sync(number, message)
            case Leaving(reason):
                return membership.leaving(number, reason)
            case StoreJoined(store):
                return membership.store_joined(number, store)
            case Barrier(sequence, store):
                return membership.barrier(number, sequence, store)
            case StoreOpened(store):
                sends = membership.store_opened(number, store)
                self._write_stores("store_opened", number, store)
                self._ledgers.store_opened(number, store)
                return sends
            case StoreEnding(store):
                return membership.store_ending(number, store)
            case StoreClosed(store):
                sends = membership.store_closed(number, message)
                self._write_stores("store_closed", number, store)
                return sends + self._ledgers.store_closed(message.rank, store)
            case Halt():
                return membership.halt(number, message)
            case Leave():
                return membership.leave(number, message)
            case WorkerExited():
                return membership.worker_exited(number, message)
            case ServersUnused():
                return self._servers_unused(number, message)
            case NotFinite():
                return membership.add_defect(number, str(message))
            case NotWhole(reason):
                return membership.add_defect(number, reason)
            case OpenLedger() | TakeLease() | Trained() | GiveBack() | CloseLedger() | Cut():
                return self._ledgers.handle(number, message)
            case Settled():
                return self._ledgers.settle(number, message)
            case Heartbeat():
                return []
            case _:
                raise Forbidden(f"{type(message).__name__} has no meaning in this job")

    def follow(self) -> list[Send]:
        """Return what follows from a change of the members: who gets the samples of a worker that left."""
        membership = self._membership
        if membership.returned:
            reports, membership.returned = membership.returned, []
            here = {member.rank for member in membership.members if member.role == WORKER}
            listed = max(reports, key=lambda report: report.view).members
            missing = [member.rank for member in listed if member.role == WORKER and member.rank not in here]
            return self._ledgers.rebuild(reports, missing)
        return self._ledgers.follow()

    def tick(self, now: float) -> list[Send]:
        """Let the state machine end its waits."""
        was_rebuilding = self._membership.is_rebuilding
        sends = self._membership.tick(now)
        if was_rebuilding:
            self._write_restart()
        return sends

    def lost(self, number: int, why: str) -> list[Send]:
        """Remove a process whose connection has ended. A message that it leaves, which is kept, does so later."""
        if any(sender == number and isinstance(message, Leave) for sender, message in self._kept):
            return []
        return self._membership.lost(number, why)

    def take_kept(self) -> list[tuple[int, FromProcess]]:
        """Return the messages that can be handled now, because the members of the job are known."""
        if self._membership.is_rebuilding:
            return []
        kept, self._kept = self._kept, []
        return kept

    def record_view(self, view: View) -> None:
        """Write a change of the view, and print it unless a worker finished. A repeated view is not a change."""
        if view.number <= self._recorded:
            return
        self._recorded = view.number
        departure = view.departure.value
        slices = [[one.primary, one.backup, one.in_sync] for one in view.slices]
        self._events.write(
            "view",
            number=view.number,
            workers=view.workers,
            reason=view.reason,
            departure=departure,
            slices=slices,
        )
        if view.departure is not Departure.LEFT:
            left = len(view.workers)
            continue_ = "1 worker continues" if left == 1 else f"{left} workers continue"
            print(f"view {view.number}: {view.reason}; {continue_}", file=sys.stderr, flush=True)

    def _return(self, number: int, message: Return) -> list[Send]:
        was_running = self._membership.running
        sends = self._membership.return_(number, message)
        is_member = self._membership.member(number) is not None
        if was_running:
            self._events.write("returned", who=str(message.member), view=self._membership.view, is_member=is_member)
            sends += self._ledgers.returned(number, message)
        else:
            self._write_restart()
        return sends

    def _write_restart(self) -> None:
        """Write that the scheduler was started again, when it knows the members of the job."""
        if self._membership.running:
            members = [str(member) for member in self._membership.members]
            self._events.write("scheduler_restarted", view=self._membership.view, members=members)

    def _register(self, number: int, message: Register) -> list[Send]:
        known, was_running = self._membership.member(number), self._membership.running
        sends = self._membership.register(number, message)
        member = self._membership.member(number)
        if member is None:
            self._events.count("refused", who=str(message)[:300])
        elif known is None:
            self._events.write("registered", who=str(member))
            if was_running:
                self._events.write("joined", who=str(member), view=self._membership.view)
        return sends

    def _write_stores(self, event: str, number: int, store: int) -> None:
        """Write that a worker has opened or closed a store, and how many it has open now."""
        if member := self._membership.member(number):
            open_stores = self._membership.num_open_stores(number)
            self._events.write(event, worker=member.rank, store=store, open=open_stores)

    def _servers_unused(self, number: int, message: ServersUnused) -> list[Send]:
        """Say once that the servers are idle."""
        is_first = self._membership.unused is None and not self._membership.running
        sends = self._membership.servers_unused(number, message)
        if is_first:
            servers = "1 server" if self._num_servers == 1 else f"{self._num_servers} servers"
            print(
                f"{message.store} runs without servers: it does not use the {servers} of this job (-s 0 starts none)",
                file=sys.stderr,
                flush=True,
            )
        return sends
