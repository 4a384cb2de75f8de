"""A server's loop: registers, receives requests and passes them to the shard of their store, until all workers left.

A worker has one connection per store; the `Configure` at its beginning says which. A shard exists from the first
worker's `Configure` until all workers have closed the store or left.
"""

from __future__ import annotations

import queue
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial

import torch

from echelon.cluster.messages import (
    MAX_STORES,
    SERVER,
    WORKER,
    Abort,
    Ask,
    Configure,
    ControlMessage,
    Failed,
    Finish,
    Leave,
    Malformed,
    Push,
    Request,
    Response,
    Roster,
    Status,
    StoreClosed,
    View,
    decode_request,
    encode,
    request_id,
    shorten,
)
from echelon.environment import Job
from echelon.errors import JobError, UsageError
from echelon.observe.events import EventLog
from echelon.server.shard import MAX_REASON, Shard
from echelon.system import keep_freed_memory, resident_bytes, usable_cores
from echelon.transport.interface import Endpoint, FramesRefused, Peer, Transport
from echelon.transport.outbox import Precedence
from echelon.transport.registration import register
from echelon.transport.sockets import ServerSockets

POLL_S = 1.0
REPORT_S = 1.0
MAX_OPEN_STORES = 256
AWAKE_S = 5e-3  # how long to poll for the next push of a step: waking up from sleep takes a tenth of a millisecond

_Seat = tuple[int, int]  # the rank of a worker, and the number of one of its stores


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
            server = _Server(post.rank, post.roster, endpoint, transport, events, allowed)
            try:
                return server.run(inbox, lambda: post.control.lost)
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
    ) -> None:
        self._rank = rank
        self._allowed_optimizers = allowed_optimizers
        self._endpoint = endpoint
        self._events = events
        self._transport = transport
        self._shards: dict[int, Shard] = {}  # by the number of the store
        self._closed: dict[int, set[int]] = {}  # by the number of the store: the workers that have closed it
        self._peers: dict[_Seat, Peer] = {}
        self._seats: dict[Peer, _Seat] = {}
        self._num_servers = sum(member.role == SERVER for member in roster.members)
        self._view = [member.rank for member in roster.members if member.role == WORKER]
        self._names = {m.rank: f"{m.endpoint_name}.".encode() for m in roster.members if m.role == WORKER}
        self._spare_cores = has_spare_cores(roster, rank)
        self._awake_until = 0.0
        self._reported_at = time.monotonic()
        self._reported: dict[int, int] = {}  # by the number of the store: its pushes at the last report
        self.malformed = 0
        endpoint.placer = self._admit

    def run(self, inbox: queue.SimpleQueue[ControlMessage], lost: Callable[[], str | None]) -> int:
        """Run until the job finishes (return 0), or until it fails (print the reason and return 1)."""
        while True:
            while not inbox.empty():
                message = inbox.get()
                match message:
                    case View():
                        self._change_view(message)
                    case StoreClosed(number, worker):
                        self._close(worker, number)
                    case Finish():
                        return 0
                    case Abort(reason):
                        return self._stop(reason)
            if why := lost():
                return self._stop(why)
            received = self._endpoint.recv(0.0 if time.monotonic() < self._awake_until else POLL_S)
            if received is not None:
                self._receive(*received)
            if self._events.is_open and (now := time.monotonic()) - self._reported_at >= REPORT_S:
                self._reported_at = now
                self._report()

    def _report(self) -> None:
        """Write what the shards have done to the event log, unless they have done nothing since the last time."""
        for number, shard in self._shards.items():
            report = shard.report()
            if report["pushes"] == self._reported.get(number, 0):
                continue
            self._reported[number] = report["pushes"]
            traffic = self._endpoint.traffic
            self._events.write(
                "server",
                rank=self._rank,
                store=number,
                sent=traffic.sent,
                received=traffic.received,
                memory_bytes=resident_bytes(),
                cpu_s=round(time.process_time(), 3),
                **report,
            )

    def _receive(self, peer: Peer, frames: list[memoryview]) -> None:
        """Carry out a request. Whatever is wrong with it ends its connection, and nothing else."""
        try:
            if not frames:
                raise Malformed("an empty message")
            self._carry_out(peer, decode_request(frames[0]), frames[1:])
        except Malformed as error:
            self._end(peer, frames, error)
        except JobError:  # of a user's own optimizer: no worker can continue
            raise
        except Exception as error:  # any: a defect that a request reveals must not stop the job of the others
            traceback.print_exc()
            self._end(peer, frames, error)

    def _admit(self, peer: Peer, head: memoryview, sizes: list[int]) -> None:
        """Refuse frames that no valid request has, before memory is taken for them."""
        try:
            request, seat = decode_request(head), self._seats.get(peer)
            shard = None if seat is None else self._shards.get(seat[1])
            num_frames, num_bytes = (0, 0) if shard is None else shard.frame_limits(request)
            if len(sizes) > num_frames or sum(sizes) > num_bytes:
                raise Malformed(
                    f"{type(request).__name__} announces {len(sizes)} frames of {sum(sizes)} bytes; it can have at "
                    f"most {num_frames} frames of {num_bytes} bytes"
                )
        except Malformed as error:
            self._end(peer, [head], error)
            raise FramesRefused from error

    def _end(self, peer: Peer, frames: Sequence[memoryview], error: Exception) -> None:
        """Reject a request, count and report it, and end its connection."""
        self.malformed += 1
        reason = f"server {self._rank}: {error if isinstance(error, Malformed) else repr(error)}"[:MAX_REASON]
        if self.malformed.bit_count() == 1:  # a peer that repeats an error does not fill the log
            self._events.write("malformed", reason=reason, count=self.malformed)
        if self.malformed == 1:  # print the first: a worker may wait for an answer
            print(f"{reason}; the server ends the connection", file=sys.stderr, flush=True)
        request = request_id(frames[0]) if frames else None
        if request is not None:
            self._endpoint.send(peer, [encode(Failed(request, reason))])
        self._endpoint.disconnect(peer)

    def _carry_out(self, peer: Peer, request: Request, frames: Sequence[memoryview]) -> None:
        if isinstance(request, Configure) and (reason := self._reason_to_refuse(peer, request)):
            self._endpoint.send(peer, [encode(Failed(request.id, f"server {self._rank}: {reason}"))])
            return
        if isinstance(request, Configure) and request.rank in self._view:
            self._open(peer, request)
        seat = self._seats.get(peer)
        if seat is not None:
            self._handle(*seat, request, frames)
        elif isinstance(request, Ask):  # its Configure was lost, so the request that it asks about never arrived
            self._endpoint.send(peer, [encode(Status(request.id, request.about, False, ""))])
        else:
            reason = "this worker is not in the view: the scheduler declared it dead, or it never joined the job"
            refusal = Failed(request.id, f"server {self._rank}: {reason}", not_in_view=True)
            self._endpoint.send(peer, [encode(refusal)])

    def _reason_to_refuse(self, peer: Peer, request: Configure) -> str | None:
        """Return why a connection cannot be that of a worker's store: it is another process's, or there is one."""
        seat = (request.rank, request.number)
        registered = self._names.get(request.rank)
        if registered is not None and not (isinstance(peer, bytes) and peer.startswith(registered)):
            return f"this connection is not one of the process that registered as worker {request.rank}"
        if self._peers.get(seat, peer) != peer:
            return f"worker {request.rank} already has another connection for its store {request.number}"
        if (other := self._seats.get(peer, seat)) != seat:
            return f"this connection is for store {other[1]} of worker {other[0]}"
        if request.rank in self._closed.get(request.number, ()):
            return f"worker {request.rank} has closed its store {request.number}"
        if request.number not in self._shards and len(self._shards) >= MAX_OPEN_STORES:
            return f"{len(self._shards)} stores are open, which is the limit; close some"
        return None

    def _open(self, peer: Peer, request: Configure) -> None:
        """Let a connection be that of a worker's store. The first worker that comes creates the shard of the store."""
        seat = (request.rank, request.number)
        self._peers[seat], self._seats[peer] = peer, seat
        if request.number not in self._shards:
            answer = partial(self._answer, request.number)
            workers = [worker for worker in self._view if worker not in self._closed.get(request.number, ())]
            self._shards[request.number] = Shard(
                self._rank, self._num_servers, workers, answer, self._transport.attach, self._allowed_optimizers
            )

    def _handle(self, worker: int, number: int, request: Request, frames: Sequence[memoryview]) -> None:
        self._shards[number].handle(worker, request, frames)
        if isinstance(request, Push):
            awake = request.header.more and self._spare_cores
            self._awake_until = time.monotonic() + AWAKE_S if awake else 0.0

    def _close(self, worker: int, number: int) -> None:
        """Stop waiting for a worker that has closed a store."""
        if worker not in self._view or not 0 <= number < MAX_STORES:
            return
        if number in self._shards:
            self._shards[number].close(worker)
        self._closed.setdefault(number, set()).add(worker)
        self._forget(worker, number)

    def _change_view(self, view: View) -> None:
        gone = [worker for worker in self._view if worker not in view.workers]
        self._view = view.workers
        for worker in gone:
            released = [shard.leave(worker) for shard in self._shards.values()]
            reason = "; ".join(dict.fromkeys(filter(None, released)))
            self._events.write("left", worker=worker, view=view.number, reason=view.reason, released=reason)
            for number in {*self._shards, *self._closed}:
                self._forget(worker, number)

    def _forget(self, worker: int, number: int) -> None:
        """Drop the connection of a worker's store, and free a store that no living worker has open or will open."""
        self._seats.pop(self._peers.pop((worker, number), b""), None)
        if self._closed.get(number, set()).issuperset(self._view):
            self._shards.pop(number, None)
            self._closed.pop(number, None)

    def _answer(
        self,
        number: int,
        worker: int,
        response: Response,
        frames: Sequence[memoryview],
        precedence: Precedence | None = None,
    ) -> None:
        if peer := self._peers.get((worker, number)):
            self._endpoint.send(peer, [encode(response), *frames], precedence)

    def _stop(self, reason: str) -> int:
        print(f"server {self._rank} stops: {reason}", file=sys.stderr, flush=True)
        return 1


def has_spare_cores(roster: Roster, rank: int) -> bool:
    """Return whether this machine has two cores per worker and server on it: one to compute, one to poll."""
    here = next(member.host for member in roster.members if (member.role, member.rank) == (SERVER, rank))
    return usable_cores() >= 2 * sum(member.host == here for member in roster.members)
