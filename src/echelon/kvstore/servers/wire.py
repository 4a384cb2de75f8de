"""How a worker's gradients reach the servers and how weights come back: memory, clocks, and one message per server.

The worker mirrors every segment of keys twice in its memory, once for gradients and once for weights. If a server can
map this memory, a message only names the keys. Otherwise the bytes follow as frames, and a long list of keys is sent as
several messages of a few megabytes. The servers then sum and answer the first message while the next one is on its way,
and the bytes that arrive are still in the cache when they are used.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace
from torch import Tensor

from echelon.cluster.messages import (
    Attach,
    Contents,
    Init,
    Offer,
    OptimizerSpec,
    Part,
    Place,
    Placed,
    Pull,
    Push,
    PushHeader,
    Request,
)
from echelon.cluster.placement import ITEM_BYTES, KeySpec, Layout, Piece, Segment, Slot
from echelon.errors import UsageError
from echelon.fault_points import fault_point
from echelon.kvstore.servers.client import Client, Rewritten, Ticket
from echelon.observe.events import EventLog
from echelon.server.storage.factored import factors_length
from echelon.server.storage.memory import as_tensor, empty_frames, frame_pieces
from echelon.server.storage.write_log import LOG_BYTES, WriteLog
from echelon.system import BLOCK_BYTES, LARGEST_INT, keep_freed_memory
from echelon.transport.interface import Block, Transport

MESSAGE_BYTES = 4 << 20
MAX_UNANSWERED = 64  # pushes of a key by a worker that does not wait; servers hold up to `MAX_AHEAD`
MAX_COPY_BYTES = 256 << 20  # of pushes without an answer whose keys are pushed again
PATIENCE_S = 10.0
_MAX_CACHED_ROUTES = 4096
PLAIN = PushHeader()  # a push that is added without weights, and that the optimizer's own settings apply to


class Mirror:
    """One segment in this worker's memory: outgoing gradients and incoming weights."""

    def __init__(self, segment: Segment, transport: Transport) -> None:
        self.segment = segment
        self._item = ITEM_BYTES[segment.dtype]
        self.gradient_block: Block = transport.allocate(segment.capacity * self._item)
        self.weight_block: Block = transport.allocate(segment.capacity * self._item)
        self.gradients = as_tensor(self.gradient_block.buffer, segment.dtype)
        self.weights = as_tensor(self.weight_block.buffer, segment.dtype)

    def gradient_bytes(self, piece: Piece) -> memoryview:
        """Return a piece of the gradients, to be sent as a frame."""
        return self.gradient_block.buffer[piece.start * self._item : piece.stop * self._item]

    def weight_bytes(self, piece: Piece) -> memoryview:
        """Return a piece of the weights, to be sent or to be filled from a frame."""
        return self.weight_block.buffer[piece.start * self._item : piece.stop * self._item]


class _Route(NamedTuple):
    """The part of a list of keys that one server stores."""

    server: int
    keys: list[int]
    pieces: list[Piece]


class Wire:
    """A worker's connection to all servers, in terms of slots."""

    def __init__(self, client: Client, num_servers: int, transport: Transport, events: EventLog) -> None:
        self.layout = Layout(num_servers)
        self.mirrors: dict[int, Mirror] = {}  # by segment
        self._num_segments = 0  # that were seen
        self._client = client
        self._transport = transport
        self._events = events
        self._logs: dict[int, Block] = {}  # by server: where it notes what it writes to this worker's memory
        self._framed = [False] * num_servers  # by server: whether bytes are sent because it cannot map our memory
        self._clocks: dict[int, int] = {}
        self._last_pushes: dict[int, list[Ticket]] = {}  # by key
        self._copies: dict[int, deque[list[Ticket]]] = {}  # by key: pushes of copies, the oldest first
        self._copied: deque[tuple[list[Ticket], int]] = deque()  # all of them, with their bytes; some are answered
        self._copied_bytes = 0  # of these
        self.gated: set[int] = set()  # keys whose last push waits for `ClippedRounds.clip`
        self._routes: dict[tuple[int, ...], list[_Route]] = {}
        client.on_moved = self._offer_again
        client.on_recovering = self._offer_state
        self.part: Callable[[], Part] = lambda: Part.ACTIVE  # set by Waiting
        self.num_recovered = 0  # servers that have lost their state and got it from the workers
        self._joined: dict[int, int] = {}  # by key: the clock from which on this worker has joined others
        self.optimizer: OptimizerSpec | None = None  # as the servers have it
        self.pushed_bytes = self.pulled_bytes = 0  # of tensors, however they travel

    @property
    def memory_is_shared(self) -> bool:
        """Whether all servers read and write this worker's memory in place."""
        return not any(self._framed)

    def restart(self) -> None:
        """Forget pushes that will not be answered."""
        self._last_pushes.clear()
        self._copies.clear()
        self.gated.clear()

    def offer_all(self) -> None:
        """Let all servers map this worker's memory, after it has connected again."""
        for server in range(self.layout.num_servers):
            self._offer_again(server)

    def gradient(self, slot: Slot) -> Tensor:
        """Return a key's gradient in this worker's memory, in the key's shape."""
        return self.mirrors[slot.segment].gradients[slot.start : slot.start + slot.length].view(slot.spec.shape)

    def weight(self, slot: Slot) -> Tensor:
        """Return a key's weights in this worker's memory, in the key's shape."""
        return self.mirrors[slot.segment].weights[slot.start : slot.start + slot.length].view(slot.spec.shape)

    def place(self, specs: Sequence[KeySpec]) -> list[Slot]:
        """Ask server 0 for the slots of keys, and allocate memory for them that the servers map if they can."""
        placed = self._client.call(0, Place(self._client.next_id(), list(specs)))
        assert isinstance(placed, Placed)
        self.layout.adopt(placed.segments, placed.slots)
        for segment in self.layout.segments[self._num_segments :]:
            if not segment.row:  # of row-sparse keys only rows travel
                self.mirrors[segment.index] = Mirror(segment, self._transport)
                self._offer(self.mirrors[segment.index])
        self._num_segments = len(self.layout.segments)
        # A gradient may be as large as a segment, and the next step needs the memory of this step's activations again.
        largest = max((len(mirror.gradient_block.buffer) for mirror in self.mirrors.values()), default=0)
        keep_freed_memory(max(BLOCK_BYTES, largest), LARGEST_INT)
        self._clocks |= {slot.key: 0 for slot in placed.slots}
        return placed.slots

    def init(self, slots: Sequence[Slot], values: Sequence[Tensor], *, overwrite: bool = False) -> None:
        """Send values to the servers: the first values of keys, or with `overwrite` new ones."""
        for slot, value in zip(slots, values, strict=True):
            self.weight(slot).copy_(value)
        tickets = []
        for route in self._route(slots):
            framed = self._framed[route.server]
            here = [self.layout.slots[key] for key in route.keys]
            message = Init(self._client.next_id(), self.layout.segments, here, framed, overwrite)
            tickets.append(self._client.send(route.server, message, self._weight_bytes(route) if framed else ()))
        self._client.wait(tickets)

    def push(
        self,
        slots: Sequence[Slot],
        values: Sequence[Tensor] | None,
        header: PushHeader = PLAIN,
        *,
        pull: bool,
        priority: int = 0,
    ) -> list[Ticket]:
        """Send gradients without waiting. `values` None: they are in this worker's memory already.

        With `header.factor_rank`, the memory of the one key holds the factors. `pull`: ask for the new weights, too.
        """
        tickets: list[Ticket] = []
        self._count_bytes(slots, pushed=not header.absent, pulled=pull)
        for clock, indices in self._messages(slots):
            fault_point("worker.push", clock)
            chosen = [slots[i] for i in indices]
            given = None if values is None else [values[i] for i in indices]
            unwritten = None if given is None or self._write(chosen, given) else given
            if unwritten is not None:
                self.wait_for_room(chosen)
                self._wait_for_memory(chosen)
                unwritten = None if self._write(chosen, unwritten) else unwritten
            sent = []
            for route in self._route(chosen):
                framed = unwritten is not None or self._framed[route.server]
                frames = self._gradient_frames(route, chosen, unwritten, header.factor_rank) if framed else ()
                message = Push(self._client.next_id(), clock, route.keys, header, pull, framed, priority=priority)
                places = self._weight_bytes(route) if pull and framed else ()
                sent.append(self._client.send(route.server, message, frames, places))
                fault_point("worker.sent", clock)
            fault_point("worker.pushed", clock)
            keys = [slot.key for slot in chosen]
            self._clocks |= dict.fromkeys(keys, clock + 1)
            self._last_pushes |= dict.fromkeys(keys, sent)
            if unwritten is not None:
                self._count_copies(chosen, sent)
            if header.gated:
                self.gated.update(keys)
            tickets += sent
        return tickets

    def pull(self, slots: Sequence[Slot], priority: int = 0) -> list[Ticket]:
        """Ask for weights without waiting; they are in this worker's memory when the tickets are answered."""
        if waiting := [slot for slot in slots if slot.key in self.gated]:
            raise UsageError(
                f"key {waiting[0].spec.name!r} was pushed in a step that has not ended; servers update it when they "
                "know the norm of all gradients; end the step before you pull"
            )
        tickets = []
        self._count_bytes(slots, pushed=False, pulled=True)
        for clock, indices in self._messages(slots):
            for route in self._route([slots[i] for i in indices]):
                framed = self._framed[route.server]
                message = Pull(self._client.next_id(), clock, route.keys, framed, priority)
                places = self._weight_bytes(route) if framed else ()
                tickets.append(self._client.send(route.server, message, places=places))
        return tickets

    def _count_bytes(self, slots: Sequence[Slot], *, pushed: bool, pulled: bool) -> None:
        size = sum(slot.length * ITEM_BYTES[slot.spec.dtype] for slot in slots)
        self.pushed_bytes += size * pushed
        self.pulled_bytes += size * pulled

    def send_to_all(self, make: Callable[[int], Request]) -> None:
        """Send a request to all servers, to server 0 first: if it refuses, no other server receives the request."""
        self._client.call(0, make(self._client.next_id()))
        others = range(1, self.layout.num_servers)
        self._client.wait([self._client.send(server, make(self._client.next_id())) for server in others])

    def last_pushes(self, slots: Sequence[Slot]) -> list[Ticket]:
        """Return the tickets of the last pushes of some keys, answered or not."""
        return list({id(t): t for slot in slots for t in self._last_pushes.get(slot.key, ())}.values())

    def clock(self, slot: Slot) -> int:
        """Return how often this worker has pushed a key."""
        return self._clocks[slot.key]

    @property
    def clocks(self) -> Mapping[int, int]:
        """How often this worker has pushed each key."""
        return self._clocks

    @property
    def newest_clock(self) -> int:
        """How often this worker has pushed the keys that it pushes in every step."""
        return max(self._clocks.values(), default=0)

    def adopt_clocks(self, clocks: Mapping[int, int]) -> bool:
        """Continue with other clocks. Return whether one has changed: this worker missed updates of that key."""
        missed = any(self._clocks.get(key, clock) != clock for key, clock in clocks.items())
        self._clocks |= {key: clock for key, clock in clocks.items() if key in self._clocks}
        return missed

    def join_at(self, clocks: Mapping[int, int]) -> None:
        """Take part in the rounds of others from these clocks on, which the others may not have reached."""
        self.adopt_clocks(clocks)
        self._joined |= clocks

    def count_push(self, slots: Sequence[Slot], sent: list[Ticket]) -> None:
        """Record a push of some keys and its tickets."""
        for slot in slots:
            self._clocks[slot.key] += 1
            self._last_pushes[slot.key] = sent
        self._count_copies(slots, sent)

    def wait_for_room(self, slots: Sequence[Slot]) -> None:
        """Wait for old pushes of keys, if a worker that does not pull has pushed them often.

        Servers keep these pushes until the other workers have made theirs, and refuse more than a limited number.
        """
        for slot in slots:
            copies = self._copies.get(slot.key)
            while copies and len(copies) >= MAX_UNANSWERED and not self._client.ready(copies[0]):
                self._client.wait(copies[0])
            while copies and self._client.ready(copies[0]):
                copies.popleft()

    def _wait_for_memory(self, slots: Sequence[Slot]) -> None:
        """Wait until another copy of keys fits in `MAX_COPY_BYTES`, or their own memory is free.

        Workers that push in the same order cannot wait for each other here: of all pushes that are not applied, the
        first one in that order waits for nobody who waits. For programs that push in different orders, the wait ends
        when no answer has come for `PATIENCE_S`, and one more copy is made. A push that waits for `ClippedRounds.clip`
        of this worker is not waited for at all.
        """
        if any(slot.key in self.gated for slot in slots):
            return
        size = _num_bytes(slots)
        while self._copied_bytes + size > MAX_COPY_BYTES and not self._client.ready(self.last_pushes(slots)):
            self._forget_answered_copies()
            if self._copied_bytes + size <= MAX_COPY_BYTES:
                return
            oldest = self._copied[0][0] if self._copied else self.last_pushes(slots)
            if not self._client.wait(oldest, PATIENCE_S):
                self._events.write("copies", bytes=self._copied_bytes + size)
                return

    def _forget_answered_copies(self) -> None:
        open_copies = [one for one in self._copied if any(ticket.response is None for ticket in one[0])]
        self._copied = deque(open_copies)
        self._copied_bytes = sum(size for _, size in open_copies)

    def _count_copies(self, slots: Sequence[Slot], sent: list[Ticket]) -> None:
        self._copied.append((sent, sum(len(frame) for ticket in sent for frame in ticket.frames[1:])))
        self._copied_bytes += self._copied[-1][1]
        for slot in slots:
            self._copies.setdefault(slot.key, deque()).append(sent)

    def wait_for_pushes(self) -> None:
        """Wait until every push is answered, except those that no `ClippedRounds.clip` has followed."""
        self._client.wait(self.last_pushes([slot for slot in self.layout.slots.values() if slot.key not in self.gated]))
        self._last_pushes.clear()

    def _write(self, slots: Sequence[Slot], values: Sequence[Tensor]) -> bool:
        """Copy values to this worker's memory, unless an earlier push of these keys is still read from there."""
        if not self._client.ready(self.last_pushes(slots)):
            return False
        for slot, value in zip(slots, values, strict=True):
            place = self.gradient(slot)
            if place.data_ptr() != value.data_ptr() or not value.is_contiguous():
                place.copy_(value)
        return True

    def _messages(self, slots: Sequence[Slot]) -> Iterator[tuple[int, list[int]]]:
        """Yield a clock and the indices of the slots of each message: equal clocks, and not too many bytes if sent."""
        clocks = [self._clocks[slot.key] for slot in slots]
        for clock in dict.fromkeys(clocks):
            indices = [index for index, its in enumerate(clocks) if its == clock]
            if self.memory_is_shared:
                yield clock, indices
                continue
            batch: list[int] = []
            size = 0
            for index in indices:
                length = slots[index].padded * ITEM_BYTES[slots[index].spec.dtype]
                if batch and size + length > MESSAGE_BYTES:
                    yield clock, batch
                    batch, size = [], 0
                batch.append(index)
                size += length
            yield clock, batch

    def _gradient_frames(
        self, route: _Route, slots: Sequence[Slot], unwritten: Sequence[Tensor] | None, factor_rank: int
    ) -> list[memoryview]:
        """Return a server's part of the gradients as frames, from this worker's memory unless they are `unwritten`."""
        if unwritten is not None:
            return self._copy_to_frames(route, slots, unwritten)
        pieces = route.pieces
        if factor_rank:
            (slot,) = slots
            pieces = [Piece(slot.segment, slot.start, slot.start + factors_length(slot, factor_rank), 0)]
        return [self.mirrors[piece.segment].gradient_bytes(piece) for piece in pieces]

    def _copy_to_frames(self, route: _Route, slots: Sequence[Slot], values: Sequence[Tensor]) -> list[memoryview]:
        """Copy values to new frames, because the keys' own memory is still in use by an earlier push."""
        frames = empty_frames(route.pieces, [segment.dtype for segment in self.layout.segments])
        for slot, value in zip(slots, values, strict=True):
            flat = value.reshape(-1)
            for piece in frame_pieces(self.layout.pieces(slot, route.server)):
                stop = min(piece.stop, slot.start + slot.length)
                if stop > piece.start:
                    part = flat[piece.start - slot.start : stop - slot.start]
                    frames.view(slot.segment, piece.start, stop).copy_(part)
                if piece.stop > max(stop, piece.start):  # the padding after the key: norms and checks read it, too
                    frames.view(slot.segment, max(stop, piece.start), piece.stop).zero_()
        return frames.buffers()

    def _weight_bytes(self, route: _Route) -> list[memoryview]:
        return [self.mirrors[piece.segment].weight_bytes(piece) for piece in route.pieces]

    def _route(self, slots: Sequence[Slot]) -> list[_Route]:
        keys = tuple(slot.key for slot in slots)
        routes = self._routes.get(keys)
        if routes is None:
            routes = []
            for server in range(self.layout.num_servers):
                parts = [(slot.key, self.layout.pieces(slot, server)) for slot in slots]
                here = [key for key, pieces in parts if pieces]
                if here:
                    pieces = frame_pieces(list(itertools.chain.from_iterable(pieces for _, pieces in parts)))
                    routes.append(_Route(server, here, pieces))
            if len(self._routes) >= _MAX_CACHED_ROUTES:
                self._routes.clear()
            self._routes[keys] = routes
        return routes

    def _offer(self, mirror: Mirror) -> None:
        """Let every server map a new segment. A server that cannot gets frames from now on."""
        for server in range(self.layout.num_servers):
            self._framed[server] = self._framed[server] or not self._is_attached(mirror, server)

    def _is_attached(self, mirror: Mirror, server: int) -> bool:
        """Let a server map a segment. Return whether it can."""
        gradients, weights = mirror.gradient_block.descriptor, mirror.weight_block.descriptor
        if not gradients:
            return False
        if server not in self._logs:
            self._logs[server] = self._transport.allocate(LOG_BYTES)
        log = self._logs[server].descriptor
        try:
            self._client.call(server, Attach(self._client.next_id(), mirror.segment, gradients, weights, log))
        except UsageError:
            self._events.write("frames", server=server, why="the server cannot attach this worker's memory")
            return False
        return True

    def _offer_again(self, server: int) -> None:
        """Let the server that stores a slice now map this worker's memory; if it cannot, send it frames."""
        framed = not all(self._is_attached(mirror, server) for mirror in self.mirrors.values())
        if framed and not self._framed[server]:
            self._client.rewrite(server, partial(self._with_frames, server))
        self._framed[server] = framed

    def _offer_state(self, server: int) -> None:
        """Give a new server what this worker has of a slice. It answers when all workers have done so."""
        keys = {key for key, slot in self.layout.slots.items() if self.layout.pieces(slot, server)}
        slots = [self.layout.slots[key] for key in sorted(keys | self._tables())]
        if server in self._logs and not self._framed[server]:
            self._client.adopt_notes(server, WriteLog(self._logs[server].buffer))
        unanswered = self._client.unanswered_pushes(server)
        answered = [min(unanswered.get(slot.key, [self._clocks[slot.key]])) for slot in slots]
        dense = [slot for slot in slots if not slot.spec.row_sparse]
        here = [route for route in self._route(dense) if route.server == server]
        frames = [frame for route in here for frame in self._weight_bytes(route)]
        segments = self.layout.segments if slots else []
        contents = _by_contents(self._client.contents(server))
        joined = [self._joined.get(slot.key, 0) for slot in slots]
        state, norm = (self.optimizer, answered, contents, joined), self._client.norms.get(server)
        self.num_recovered += 1
        offer = Offer(self._client.next_id(), segments, slots, *state, self.part(), norm)
        self._client.wait([self._client.send(server, offer, frames)])

    def _tables(self) -> set[int]:
        return {key for key, slot in self.layout.slots.items() if slot.spec.row_sparse}

    def _with_frames(self, server: int, request: Request) -> Rewritten | None:
        """Return a request with frames in place of shared memory, and the places for those of its answer."""
        if not isinstance(request, Push | Pull) or request.framed:
            return None
        slots = [self.layout.slots[key] for key in request.keys]
        pieces = [piece for slot in slots for piece in self.layout.pieces(slot, server)]
        route = _Route(server, list(request.keys), frame_pieces(pieces))
        places = self._weight_bytes(route)
        if isinstance(request, Pull):
            return replace(request, framed=True), [], places
        frames = self._gradient_frames(route, slots, None, request.header.factor_rank)
        return replace(request, framed=True), frames, places if request.pull else []


def _by_contents(contents: Mapping[int, Contents]) -> list[Contents]:
    """Return the contents of all keys, those that are the same only once."""
    found: dict[int, tuple[Contents, list[int]]] = {}  # keys of one answer have the same object
    for key, one in contents.items():
        found.setdefault(id(one), (one, []))[1].append(key)
    return [replace(one, keys=keys) for one, keys in found.values()]


def _num_bytes(slots: Sequence[Slot]) -> int:
    return sum(slot.padded * ITEM_BYTES[slot.spec.dtype] for slot in slots)
