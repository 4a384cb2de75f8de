"""One slice on one server process: a shard for each store of the job, as the primary of the slice or as its backup.

Everything that changes a shard is an input: requests of workers, and that a worker came or is gone. The primary sends
each input to the backup, if there is one (`replication`), and carries it out; the backup carries out the same inputs,
without answers. When the primary is lost, the backup becomes the primary: it forgets the requests that were not
answered, which their workers send again, and continues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol

from echelon.cluster.messages import (
    Ask,
    Attach,
    Came,
    Done,
    Failed,
    Gone,
    OpenShard,
    Replicate,
    Replicated,
    Request,
    Response,
    Settled,
    SliceWork,
    decode_request,
    encode,
)
from echelon.observe.events import EventLog
from echelon.observe.history import ShardHistory
from echelon.server.shard.answer import Answer
from echelon.server.shard.shard import Shard
from echelon.server.shard.snapshot import Input, inputs_of
from echelon.server.slices.recovery import Recovered, Recovery, rebuild
from echelon.server.slices.replication import Received, Send, Stream
from echelon.server.slices.seats import Seat
from echelon.server.slices.state_file import SavedState
from echelon.transport.outbox import Precedence

SendAnswer = Callable[[Seat, Response, Sequence[memoryview], Precedence | None], None]


class MakeShard(Protocol):
    """Creates a shard of this slice."""

    def __call__(self, slice_number: int, workers: Mapping[int, str], answer: Answer, /) -> Shard: ...


class HostedSlice:
    """The shards of one slice."""

    def __init__(
        self,
        number: int,
        make_shard: MakeShard,
        send_answer: SendAnswer,
        *,
        is_primary: bool,
        history: EventLog | None = None,
    ) -> None:
        """`history`: where every update is recorded, if at all."""
        self.number = number
        self.is_primary = is_primary
        self.shards: dict[int, Shard] = {}  # by the number of the store
        self.stream: Stream | None = None  # to the backup
        self.recoveries: dict[int, Recovery] = {}  # by the number of the store: what has to be rebuilt
        self._make_shard = make_shard
        self._send_answer = send_answer
        self._history = history
        self._received = Received()
        self._framed: set[tuple[int, int]] = set()  # (store, worker) whose memory the backup cannot map
        self._refused_memory: set[tuple[int, int]] = set()  # of these, those that it has tried to map
        self._refused = False  # whether the last request was

    # --- inputs

    def open(self, store: int, workers: Mapping[int, str], now: float) -> None:
        """Create the shard of a store. `workers`: their ranks, and the token of each one's process."""
        self._take_own(store, 0, OpenShard(0, dict(workers)), now)

    def worker_came(self, worker: int, token: str, now: float) -> None:
        """Let a worker that joined the job use the stores that are open."""
        for store in list(self.shards):
            self.worker_joined_store(store, worker, token, now)

    def worker_joined_store(self, store: int, worker: int, token: str, now: float) -> None:
        """Let a worker use a store that is open."""
        self._take_own(store, worker, Came(0, token), now)

    def worker_gone(self, worker: int, view: int, now: float) -> str:
        """Remove a worker that has left the job. Return the reasons of what that released."""
        released = [self._gone(store, worker, view, now, closed=False) for store in list(self.shards)]
        return "; ".join(dict.fromkeys(filter(None, released)))

    def store_closed(self, store: int, worker: int, view: int, now: float) -> None:
        """Remove a worker from a store that it has closed."""
        if store in self.shards:
            self._gone(store, worker, view, now, closed=True)

    def take(
        self, store: int, worker: int, request: Request, body: bytes, frames: Sequence[memoryview], now: float
    ) -> None:
        """Carry out a request of a worker. `body` is the request as it arrived."""
        stream = self.stream
        if stream is not None and not isinstance(request, Ask):
            if isinstance(request, Attach):
                stream.forward(store, worker, body, frames, now, partial(self._attached, store, worker))
            elif framed := self._for_backup(store, worker, request, stream):
                stream.forward(store, worker, encode(framed[0]), framed[1], now)
            else:
                stream.forward(store, worker, body, frames, now)
        self._carry_out(store, worker, request, frames)
        if self._refused and stream is not None and not isinstance(request, Ask):
            stream.note_refusal()

    def _for_backup(
        self, store: int, worker: int, request: Request, stream: Stream
    ) -> tuple[Request, list[memoryview]] | None:
        """Return a request with frames, if the backup cannot read what it has in its worker's memory, or not in time.

        While a new backup is brought up to date, workers get their answers at once and write other gradients to their
        memory, so the frames are copies.
        """
        if stream.holds_answers and (store, worker) not in self._framed:
            return None
        framed = self.shards[store].as_frames(worker, request)
        if framed is None or stream.holds_answers:
            return framed
        return framed[0], [memoryview(bytearray(frame)) for frame in framed[1]]

    def _attached(self, store: int, worker: int, refused: bool) -> None:
        """Send frames from now on if the backup cannot map a worker's memory, for example on another machine."""
        if refused:
            self._framed.add((store, worker))
            self._refused_memory.add((store, worker))
        elif (store, worker) not in self._refused_memory:
            self._framed.discard((store, worker))

    def receive(self, message: Replicate, frames: Sequence[memoryview]) -> None:
        """Carry out an input as the backup, if it is the next one."""
        if not self.is_primary and self._received.is_next(message.id):
            self._carry_out(message.store, message.worker, decode_request(message.body), frames)

    def acknowledgement(self) -> Replicated:
        """Return which input was the last that was carried out as the backup, and whether it was refused."""
        return Replicated(self._received.last, self.number, self._refused)

    def _take_own(self, store: int, worker: int, change: OpenShard | Came | Gone, now: float) -> str:
        if self.stream is not None:
            self.stream.forward(store, worker, encode(change), (), now)
        return self._carry_out(store, worker, change, ())

    def _gone(self, store: int, worker: int, view: int, now: float, *, closed: bool) -> str:
        return self._take_own(store, worker, Gone(0, closed, view), now)

    def _carry_out(self, store: int, worker: int, request: Request, frames: Sequence[memoryview]) -> str:
        """Carry out an input. Return the reason of what a departure released."""
        self._refused = False
        match request:
            case OpenShard(workers=workers):
                self.shards[store] = self._new_shard(store, workers)
            case Came(token=token):
                self.shards[store].admit(worker, token)
            case Gone(closed=closed, view=view):
                shard = self.shards[store]
                if closed:
                    shard.close(worker, view)
                    return ""
                return shard.leave(worker, view)
            case _:
                self.shards[store].handle(worker, request, frames)
        return ""

    def _new_shard(self, store: int, workers: Mapping[int, str]) -> Shard:
        shard = self._make_shard(self.number, workers, partial(self._answer, store))
        shard.is_passive = not self.is_primary
        if self._history is not None:
            shard.history = ShardHistory(self._history, store, self.number, is_copy=shard.is_passive)
        return shard

    def free(self, store: int) -> None:
        """Forget a store that all workers have closed. A backup does so when nobody is left in it."""
        self.shards.pop(store, None)
        self.recoveries.pop(store, None)

    def _answer(
        self,
        store: int,
        worker: int,
        response: Response,
        frames: Sequence[memoryview],
        precedence: Precedence | None = None,
    ) -> None:
        self._refused = self._refused or isinstance(response, Failed)
        if not self.is_primary:
            return
        send = partial(self._send_answer, Seat(worker, store, self.number), response, frames, precedence)
        if self.stream is None:
            send()
        else:
            self.stream.hold(send)

    # --- who stores the slice

    def send_settlements(self, send: Callable[[Settled], None]) -> None:
        """Tell the scheduler what became of the steps of workers that have left, when the backup knows it, too."""
        if not self.is_primary:
            return  # what was settled by now is sent when this slice becomes the primary
        for store, shard in self.shards.items():
            for settled in shard.work.take_settlements() if shard.work is not None else ():
                tell = partial(send, settled.message(store, self.number))
                if self.stream is None:
                    tell()
                else:
                    self.stream.hold(tell)

    def send_settlements_again(self) -> None:
        """Let the next call send the latest ones again, because the scheduler may not have got them."""
        for shard in self.shards.values():
            if shard.work is not None:
                shard.work.send_settlements_again()

    def work(self) -> list[SliceWork]:
        """Return which samples the stores have trained, for a scheduler that was started again."""
        shards = self.shards.items()
        return [part for store, shard in shards if shard.work is not None for part in shard.work.report(store)]

    def promote(self, living: Mapping[int, str], view: int, now: float) -> None:
        """Become the primary, because the old one was lost. Workers that left meanwhile are removed.

        `living`: the workers of the job, and the token of each one's process. The old primary may have been lost before
        it forwarded that a process left, and that another one with its rank came.
        """
        self.is_primary = True
        for store, shard in list(self.shards.items()):
            shard.promote()
            if shard.history is not None:
                shard.history.promote()
            for worker in [worker for worker, token in shard.workers.items() if living.get(worker) != token]:
                self._gone(store, worker, view, now, closed=False)
        self.send_settlements_again()

    def use_backup(self, send: Send, now: float) -> None:
        """Send all inputs to a backup from now on, beginning with those that give it the present state.

        Raise UsageError, and go on without a backup, if an optimizer class keeps something that cannot be sent.
        """
        self._framed.clear()
        self._refused_memory.clear()
        states = {store: list(inputs_of(shard)) for store, shard in self.shards.items()}
        self.stream = Stream(self.number, send, now, holds_answers=not self.shards)
        for store, inputs in states.items():
            self._send_state(store, inputs, now)

    def _send_state(self, store: int, inputs: Iterable[Input], now: float) -> None:
        """Send the backup the inputs that give it the present state of a shard."""
        assert self.stream is not None
        for worker, request, frames in inputs:
            on_result = None
            if isinstance(request, Attach):
                self._framed.add((store, worker))  # until the backup has mapped its memory
                on_result = partial(self._attached, store, worker)
            self.stream.forward(store, worker, encode(request), frames, now, on_result)

    def recover(self, store: int, workers: Mapping[int, str], saved: SavedState | None, now: float) -> Recovered:
        """Rebuild the shard of a store from what its workers have offered, and carry out the requests that waited."""
        recovery = self.recoveries.pop(store)
        shard = self._new_shard(store, workers)
        found = rebuild(shard, recovery, saved)
        self.shards[store] = shard
        if self.stream is not None:
            self._send_state(store, inputs_of(shard), now)
        for worker, (offer, _) in recovery.offers.items():
            self._answer(store, worker, Done(offer.id), ())
        for held in recovery.held:
            self.take(store, *held, now)
        return found

    def drop_backup(self) -> None:
        """Go on without a backup: all answers that waited for it leave."""
        if self.stream is not None:
            stream, self.stream = self.stream, None
            stream.close()
