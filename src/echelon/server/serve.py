"""A server's loop: it registers, follows the scheduler's messages and receives requests, until all workers left.

`slices` decides which slices this process stores; `reception` passes each request to its slice.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from echelon.cluster.messages import (
    SERVER,
    Abort,
    ControlMessage,
    Finish,
    Leave,
    Member,
    Push,
    Removed,
    Return,
    Roster,
    StoreClosed,
    View,
    shorten,
)
from echelon.environment import Job
from echelon.errors import JobError, UsageError
from echelon.observe.events import EventLog
from echelon.server.reception import Reception
from echelon.server.slices.assignment import Slices, TellScheduler
from echelon.system import keep_freed_memory, resident_bytes, usable_cores
from echelon.transport.interface import Endpoint, Transport
from echelon.transport.registration import register
from echelon.transport.sockets import ServerSockets

POLL_S = 1.0
REPORT_S = 1.0
AWAKE_S = 5e-3  # how long to poll for the next push of a step: waking up from sleep takes a tenth of a millisecond


def serve(job: Job, transport: Transport) -> int:
    """Run a server until the job ends; return 0 if it succeeded."""
    if not job.distributed:
        raise UsageError("the server has no scheduler address: set DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT")
    torch.set_num_threads(1)  # a machine usually runs several servers, which would compete for cores
    torch.sparse.check_sparse_tensor_invariants.disable()  # rows are checked when they arrive; torch would warn
    keep_freed_memory(one_arena=True)
    inbox: queue.SimpleQueue[ControlMessage] = queue.SimpleQueue()
    try:
        with register(job, SERVER, transport) as post, EventLog.open(job.run_dir, SERVER, post.rank) as events:
            endpoint = post.endpoint
            assert endpoint is not None

            def on_message(message: ControlMessage) -> None:
                inbox.put(message)
                endpoint.wake()

            post.set_handler(on_message)
            if isinstance(endpoint, ServerSockets):
                endpoint.strangers.who, endpoint.strangers.events = f"server {post.rank}", events
            allowed = (job.allow_optimizers or "").split(",")
            states = None if job.joined_file is None else Path(job.joined_file).parent / "states"
            server = _Server(post.rank, post.roster, endpoint, transport, events, allowed, states)
            post.control.greeting = partial(server.report_to_scheduler, post.member)
            post.control.on_returned = server.returned_to_scheduler
            try:
                return server.run(inbox, lambda: post.control.lost, post.control.send)
            except JobError as error:  # of a user's own optimizer: all processes say why the job ends
                post.control.send(Leave(shorten(str(error)), failed=True))
                raise
    except JobError as error:
        print(f"server stops: {error}", file=sys.stderr, flush=True)
        return 1


class _Server:
    def __init__(
        self,
        rank: int,
        roster: Roster,
        endpoint: Endpoint,
        transport: Transport,
        events: EventLog,
        allowed_optimizers: Sequence[str] = (),
        state_folder: Path | None = None,
    ) -> None:
        self._rank = rank
        self.endpoint = endpoint
        self._events = events
        self._spare_cores = has_spare_cores(roster, rank)
        self._awake_until = 0.0
        self._reported_at = time.monotonic()
        self._reported: dict[tuple[int, int], int] = {}  # by slice and store: its pushes at the last report
        self._lock = threading.Lock()  # the thread of the control connection reads what the other thread changes
        self.slices = Slices(rank, roster, endpoint, transport, events, allowed_optimizers, state_folder)
        self.reception = Reception(rank, self.slices, endpoint, events, self._stay_awake)
        endpoint.placer = self.reception.admit

    @contextmanager
    def report_to_scheduler(self, own: Member) -> Iterator[Return]:
        """Yield what a scheduler that was started again has to know from this server. It does not change meanwhile."""
        with self._lock:
            view = self.slices.view
            held = self.slices.held()
            yield Return(own, view.number, view.members, view.slices, held=held, outcome=view.outcome)

    def returned_to_scheduler(self) -> None:
        """Send again what may have been lost with the connection to the scheduler."""
        with self._lock:
            for hosted in self.slices.hosted.values():
                hosted.send_settlements_again()
        self.endpoint.wake()

    def run(
        self,
        inbox: queue.SimpleQueue[ControlMessage],
        lost: Callable[[], str | None],
        tell_scheduler: TellScheduler = lambda message: None,
    ) -> int:
        """Run until the job finishes (return 0), or until it fails (print the reason and return 1)."""
        self.slices.connect(tell_scheduler)
        while True:
            while not inbox.empty():
                status = self.follow(inbox.get())
                if status is not None:
                    return status
            if why := lost():
                return self._stop(why)
            received = self.endpoint.recv(0.0 if time.monotonic() < self._awake_until else POLL_S)
            with self._lock:
                if received is not None:
                    self.reception.receive(*received)
                self._do_what_is_due(time.monotonic())

    def follow(self, message: ControlMessage) -> int | None:
        """Handle a message of the scheduler. Return the exit status if this server ends."""
        match message:
            case View():
                with self._lock:
                    self.slices.follow(message)
                    self.reception.receive_early()
            case StoreClosed(number, worker):
                with self._lock:
                    self.slices.close(worker, number)
            case Finish():
                self.slices.report_ends()
                return 0
            case Abort(reason):
                return self._stop(reason)
            case Removed(_, reason):
                return self._stop(f"the scheduler removed this server from the job: {reason}")
        return None

    def _stay_awake(self, push: Push) -> None:
        """Poll for the next push of a step for a short while, if it is about to arrive and a core is free."""
        awake = push.header.more and self._spare_cores
        self._awake_until = time.monotonic() + AWAKE_S if awake else 0.0

    def _do_what_is_due(self, now: float) -> None:
        self.slices.send_due(now)
        if self._events.is_open and now - self._reported_at >= REPORT_S:
            self._reported_at = now
            self._report()

    def _report(self) -> None:
        """Write what the shards have done to the event log, unless they have done nothing since the last time."""
        for hosted in self.slices.hosted.values():
            for number, shard in hosted.shards.items():
                report = shard.report()
                place = hosted.number, number
                if not hosted.is_primary or report["pushes"] == self._reported.get(place, 0):
                    continue
                self._reported[place] = report["pushes"]
                traffic = self.endpoint.traffic
                self._events.write(
                    "server",
                    rank=hosted.number,
                    store=number,
                    sent=traffic.sent,
                    received=traffic.received,
                    memory_bytes=resident_bytes(),
                    cpu_s=round(time.process_time(), 3),
                    **report,
                )

    def _stop(self, reason: str) -> int:
        print(f"server {self._rank} stops: {reason}", file=sys.stderr, flush=True)
        return 1


def has_spare_cores(roster: Roster, rank: int) -> bool:
    """Return whether this machine has two cores per worker and server on it: one to compute, one to poll."""
    here = next(member.host for member in roster.members if (member.role, member.rank) == (SERVER, rank))
    return usable_cores() >= 2 * sum(member.host == here for member in roster.members)
