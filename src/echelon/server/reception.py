"""What the messages of a server's connections mean: who sends them, if they are admitted, and which slice they are for.

A worker has one connection per store and slice; the `Configure` at its beginning says which. A shard exists from the
first worker's `Configure` until all workers have closed the store or left. A message that is wrong ends its connection,
and nothing else.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Sequence

from echelon.cluster.messages import (
    Ask,
    Between,
    Configure,
    Failed,
    Malformed,
    NotFinite,
    Offer,
    Push,
    Recovering,
    Replicate,
    Request,
    Status,
    decode_request,
    encode,
    request_id,
)
from echelon.cluster.placement import Layout
from echelon.errors import JobError
from echelon.observe.events import EventLog
from echelon.schemes import SCHEMES, has_settings
from echelon.server.shard.frame_limits import frame_limits
from echelon.server.shard.room import Room, default_limit
from echelon.server.shard.shard import MAX_REASON, Shard
from echelon.server.slices.assignment import Slices
from echelon.server.slices.early_messages import EarlyMessages
from echelon.server.slices.recovery import HeldRequest
from echelon.server.slices.seats import Seat
from echelon.system import machine_memory
from echelon.transport.interface import Endpoint, FramesDeferred, FramesRefused, Peer

MAX_OPEN_STORES = 256
NOT_IN_VIEW = "this worker is not in the view: the scheduler declared it dead, or it never joined the job"


class Reception:
    """Receives the messages of workers and of other servers, and passes them to the slices."""

    def __init__(
        self,
        rank: int,
        slices: Slices,
        endpoint: Endpoint,
        events: EventLog,
        on_push: Callable[[Push], None] = lambda push: None,
    ) -> None:
        """`on_push` is called after each push."""
        self._rank = rank
        self._slices = slices
        self._endpoint = endpoint
        self._events = events
        self._on_push = on_push
        self._early = EarlyMessages()
        self._room = Room(default_limit())
        self._printed_finding = False
        self.malformed = 0

    def receive(self, peer: Peer, frames: list[memoryview]) -> None:
        """Carry out a request. Whatever is wrong with it ends its connection, and nothing else."""
        try:
            if not frames:
                raise Malformed("an empty message")
            self._carry_out(peer, decode_request(frames[0]), frames)
        except Malformed as error:
            self._end(peer, frames, error)
        except JobError:  # of a user's own optimizer: no worker can continue
            raise
        except Exception as error:  # any: a defect that a request reveals must not stop the job of the others
            traceback.print_exc()
            self._end(peer, frames, error)

    def receive_early(self) -> None:
        """Carry out the messages that were kept until this server became the primary of their slice."""
        for hosted in self._slices.primaries:
            for peer, frames in self._early.take(hosted.number):
                self.receive(peer, frames)

    def admit(self, peer: Peer, head: memoryview, sizes: list[int]) -> None:
        """Refuse frames that no valid request has, before memory is taken for them."""
        try:
            request = decode_request(head)
            if isinstance(request, Replicate) and self._slices.links.is_server(peer):
                return  # the primary has checked them
            seat = self._slices.seats.seat_of(peer) or self._early.seat_of(peer)
            if seat is None and sizes:
                self._refuse_as_unknown(peer, request, NOT_IN_VIEW)
                self._endpoint.disconnect(peer)
                raise FramesRefused
            hosted = None if seat is None else self._slices.hosted.get(seat.slice)
            shard = None if seat is None or hosted is None else hosted.shards.get(seat.store)
            num_frames, num_bytes = (0, 0) if shard is None else shard.frame_limits(request)
            if seat is not None and (hosted is None or seat.store in hosted.recoveries):
                num_frames, num_bytes = frame_limits(Layout(self._slices.total, machine_memory()), request)
            if len(sizes) > num_frames or sum(sizes) > num_bytes:
                raise Malformed(
                    f"{type(request).__name__} announces {len(sizes)} frames of {sum(sizes)} bytes; it can have at "
                    f"most {num_frames} frames of {num_bytes} bytes"
                )
            if isinstance(request, Push) and seat is not None and shard is not None:
                self._check_room(peer, seat.worker, shard, request, sum(sizes))
        except Malformed as error:
            self._end(peer, [head], error)
            raise FramesRefused from error

    def _check_room(self, peer: Peer, worker: int, shard: Shard, push: Push, num_bytes: int) -> None:
        """Defer a push if too many gradients wait for other workers, and nothing waits for this one."""
        held = self._slices.held_bytes + self._endpoint.traffic.queued
        if not self._room.admits(peer, num_bytes, held, lambda: shard.need_for(worker, push), time.monotonic()):
            raise FramesDeferred

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

    def _carry_out(self, peer: Peer, request: Request, frames: list[memoryview]) -> None:
        if isinstance(request, Between):
            self._slices.backups.carry_out(peer, request, frames)
            return
        if isinstance(request, Configure):
            if self._slices.seats.is_of_another_process(peer, request.rank):
                why = f"this connection is not one of the process that registered as worker {request.rank}"
                self._refuse_as_unknown(peer, request, why)
                return
            if self._comes_early(peer, request, frames):
                return
            if reason := self._reason_to_refuse(peer, request):
                self._endpoint.send(peer, [encode(Failed(request.id, f"server {self._rank}: {reason}"))])
                return
            if self._lacks_settings(request):
                self._refuse_as_unknown(peer, request, "no other worker has created this store yet")
                return
            if request.rank in self._slices.workers and self._open(peer, request):
                return
        seat = self._slices.seats.seat_of(peer)
        if seat is not None:
            self._handle(seat, request, frames)
        elif isinstance(request, Ask):  # its Configure was lost, so the request that it asks about never arrived
            self._endpoint.send(peer, [encode(Status(request.id, request.about, False, ""))])
        elif not self._early.keep_next(peer, frames):
            self._refuse_as_unknown(peer, request, NOT_IN_VIEW)

    def _refuse_as_unknown(self, peer: Peer, request: Request, reason: str) -> None:
        """Refuse a request of a process that is not a worker of the job any more, or not yet to this server."""
        refusal = Failed(request.id, f"server {self._rank}: {reason}", not_in_view=True)
        self._endpoint.send(peer, [encode(refusal)])

    def _comes_early(self, peer: Peer, request: Configure, frames: list[memoryview]) -> bool:
        """Keep the first message of a worker that knows before this server that it stores a slice now."""
        hosted = self._slices.hosted.get(request.slice)
        if (hosted is not None and hosted.is_primary) or request.slice >= self._slices.total:
            return False
        self._early.keep(request.slice, peer, frames)
        return True

    def _reason_to_refuse(self, peer: Peer, request: Configure) -> str | None:
        """Return why a connection cannot be that of a worker's store: it is another process's, or there is one."""
        if reason := self._slices.seats.reason_to_refuse(peer, request):
            return reason
        if request.slice >= self._slices.total:
            return f"there is no slice {request.slice}: the job has {self._slices.total}"
        if self._slices.has_closed(request.rank, request.number):
            return f"worker {request.rank} has closed its store {request.number}"
        shards = self._slices.hosted[request.slice].shards
        if request.number not in shards and len(shards) >= MAX_OPEN_STORES:
            return f"{len(shards)} stores are open, which is the limit; close some"
        return None

    def _lacks_settings(self, request: Configure) -> bool:
        """Return whether a worker joins before those whose bound or groups it should take over. It asks again."""
        hosted = self._slices.hosted[request.slice]
        if not request.late or request.number in hosted.shards or request.number in hosted.recoveries:
            return False
        return request.store in SCHEMES and not has_settings(request.store, request.staleness, request.groups)

    def _open(self, peer: Peer, request: Configure) -> bool:
        """Let a connection be that of a worker's store. The first worker that comes creates the shard of the store.

        Return whether the request was answered: the shard has to be rebuilt, and the worker should offer what it has.
        """
        self._slices.seats.take(peer, Seat(request.rank, request.number, request.slice))
        hosted = self._slices.hosted[request.slice]
        if (recovery := hosted.recoveries.get(request.number)) is not None:
            recovery.take_config(request)
            self._endpoint.send(peer, [encode(Recovering(request.id))])
            return True
        if request.number not in hosted.shards:
            hosted.open(request.number, self._slices.users(request.number), time.monotonic())
        return False

    def _handle(self, seat: Seat, request: Request, frames: Sequence[memoryview]) -> None:
        hosted = self._slices.hosted.get(seat.slice)
        if hosted is None or not hosted.is_primary:
            return  # another server stores the slice now; the next view tells the worker
        if (recovery := hosted.recoveries.get(seat.store)) is not None:
            if isinstance(request, Offer):
                recovery.add(seat.worker, request, frames[1:])
                self._slices.recover_if_complete(hosted, seat.store)
            else:
                recovery.held.append(HeldRequest(seat.worker, request, bytes(frames[0]), frames[1:]))
            return
        hosted.take(seat.store, seat.worker, request, bytes(frames[0]), frames[1:], time.monotonic())
        if findings := hosted.shards[seat.store].take_findings():
            self._report_findings(findings)
        if isinstance(request, Push):
            self._on_push(request)

    def _report_findings(self, findings: Sequence[NotFinite]) -> None:
        """Write which pushes brought NaN or infinity. The first one of this process is printed, too."""
        for finding in findings:
            self._events.write(
                "not_finite", store=finding.store, key=finding.key, worker=finding.worker, clock=finding.clock
            )
        if not self._printed_finding:
            self._printed_finding = True
            print(f"server {self._rank}: {findings[0]}", file=sys.stderr, flush=True)
