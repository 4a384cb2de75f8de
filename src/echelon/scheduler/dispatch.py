"""Which method of the state machine handles which message, and what is recorded of it."""

from __future__ import annotations

import sys

from echelon.cluster.membership import Membership, Send
from echelon.cluster.messages import (
    Barrier,
    Departure,
    FromProcess,
    Halt,
    Heartbeat,
    Leave,
    Register,
    ServersUnused,
    StoreClosed,
    StoreEnding,
    StoreOpened,
    View,
    WorkerExited,
)
from echelon.observe.events import EventLog


class Dispatch:
    """Passes messages to the state machine and writes the events of the job."""

    def __init__(self, membership: Membership, events: EventLog, num_servers: int) -> None:
        self._membership = membership
        self._events = events
        self._num_servers = num_servers

    def handle(self, number: int, message: FromProcess) -> list[Send]:
        """Handle a message of a connection; return what to send. Raises Forbidden, and then has changed nothing."""
        membership = self._membership
        match message:
            case Register():
                return self._register(number, message)
            case Barrier(sequence, store):
                return membership.barrier(number, sequence, store)
            case StoreOpened(store):
                sends = membership.store_opened(number, store)
                self._write_stores("store_opened", number, store)
                return sends
            case StoreEnding(store):
                return membership.store_ending(number, store)
            case StoreClosed(store):
                sends = membership.store_closed(number, message)
                self._write_stores("store_closed", number, store)
                return sends
            case Halt():
                return membership.halt(number, message)
            case Leave():
                return membership.leave(number, message)
            case WorkerExited():
                return membership.worker_exited(number, message)
            case ServersUnused():
                return self._servers_unused(number, message)
            case Heartbeat():
                return []

    def record_view(self, view: View) -> None:
        """Write that a worker has left, and print it unless it finished."""
        departure = view.departure.value
        self._events.write("view", number=view.number, workers=view.workers, reason=view.reason, departure=departure)
        if view.departure is not Departure.LEFT:
            left = len(view.workers)
            print(f"view {view.number}: {view.reason}; {left} workers continue", file=sys.stderr, flush=True)

    def _register(self, number: int, message: Register) -> list[Send]:
        known = self._membership.member(number)
        sends = self._membership.register(number, message)
        member = self._membership.member(number)
        if member is None:
            self._events.count("refused", who=str(message)[:300])
        elif known is None:
            self._events.write("registered", who=str(member))
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
