"""How a worker's gradients leave and its weights arrive: its memory, its clocks, and what goes to which server.

Where a server sees this worker's memory, a message names keys and that is all. Where it does not, the bytes follow as
frames, and a long list of keys leaves as several messages of a few megabytes: servers then sum and answer the first
while the next is on its way, and what arrives is still in the cache when it is used.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from echelon.cluster.messages import Attach, Init, Place, Placed, Pull, Push
from echelon.cluster.placement import ITEM_BYTES, KeySpec, Layout, Piece, Slot
from echelon.errors import UsageError
from echelon.kvstore.servers.arena import Arena, Mirror
from echelon.kvstore.servers.client import Client, Ticket
from echelon.observe.events import EventLog
from echelon.server.factored import factors_length
from echelon.server.memory import empty_frames, frame_pieces
from echelon.transport.allocator import BLOCK_BYTES, LARGEST_INT, keep_freed_memory
from echelon.transport.interface import Buffer, Transport

BATCH_BYTES = 4 << 20
_REMEMBERED = 4096


class _Route(NamedTuple):
    """A server's part of a list of keys."""

    server: int
    keys: list[int]
    pieces: list[Piece]


class Wire:
    """A worker's connection to all servers, in terms of slots."""

    def __init__(self, client: Client, num_servers: int, transport: Transport, events: EventLog) -> None:
        self.layout = Layout(num_servers)
        self.arena = Arena(transport)
        self._client = client
        self._events = events
        self._framed = [False] * num_servers
        self._clocks: dict[int, int] = {}
        self._pushing: dict[int, list[Ticket]] = {}
        self._routes: dict[tuple[int, ...], list[_Route]] = {}

    @property
    def memory_is_shared(self) -> bool:
        """Whether all servers read and write this worker's memory in place."""
        return not any(self._framed)

    def place(self, specs: Sequence[KeySpec]) -> list[Slot]:
        """Find out where keys live, and have memory for them that the servers see if they can."""
        placed = self._client.call(0, Place(self._client.next_id(), list(specs)))
        assert isinstance(placed, Placed)
        self.layout.adopt(placed.segments, placed.slots)
        for mirror in self.arena.grow(self.layout.segments):
            self._offer(mirror)
        # A gradient may be as large as a segment, and a step's activations come back with the next step.
        largest = max(len(mirror.gradient_block.buffer) for mirror in self.arena.mirrors)
        keep_freed_memory(max(BLOCK_BYTES, largest), LARGEST_INT)
        self._clocks |= {slot.key: 0 for slot in placed.slots}
        return placed.slots

    def init(self, slots: Sequence[Slot], values: Sequence[Tensor], *, overwrite: bool = False) -> None:
        """Give the servers the first values of keys, or others."""
        for slot, value in zip(slots, values, strict=True):
            self.arena.weight(slot).copy_(value)
        tickets = []
        for route in self._route(slots):
            framed = self._framed[route.server]
            mirrors = self.arena.mirrors
            frames = [mirrors[piece.segment].weight_bytes(piece) for piece in route.pieces] if framed else []
            here = [self.layout.slots[key] for key in route.keys]
            message = Init(self._client.next_id(), self.layout.segments, here, framed, overwrite)
            tickets.append(self._client.send(route.server, message, frames))
        self._client.wait(tickets)

    def push(
        self,
        slots: Sequence[Slot],
        values: Sequence[Tensor] | None,
        *,
        pull: bool,
        samples: float | None = None,
        lrs: Sequence[float] = (),
        halt: bool = False,
        factor_rank: int = 0,
        more: bool = False,
    ) -> list[Ticket]:
        """Send gradients on their way. `values` None: they are in their places already. `pull`: ask for the weights.

        `halt`: ask all to stop, too. `factor_rank` above 0: in the place of the one gradient there are its factors,
        which every server needs all of, whichever part of the key it has. `more`: the next push follows within
        milliseconds.
        """
        tickets: list[Ticket] = []
        for clock, indices in self._messages(slots):
            chosen = [slots[i] for i in indices]
            given = None if values is None else [values[i] for i in indices]
            tickets += self._push(chosen, given, clock, pull, samples, list(lrs), halt, factor_rank, more)
        return tickets

    def pull(self, slots: Sequence[Slot]) -> list[Ticket]:
        """Ask for weights; they are in their places when the tickets are answered."""
        tickets = []
        for clock, indices in self._messages(slots):
            for route in self._route([slots[i] for i in indices]):
                framed = self._framed[route.server]
                message = Pull(self._client.next_id(), clock, route.keys, framed)
                places = self._places(route.pieces) if framed else ()
                tickets.append(self._client.send(route.server, message, places=places))
        return tickets

    def pushes(self, slots: Sequence[Slot]) -> list[Ticket]:
        """The last pushes of some keys, answered or not."""
        return list({id(t): t for slot in slots for t in self._pushing.get(slot.key, ())}.values())

    def settle(self) -> None:
        """Wait for every push under way."""
        self._client.wait(self.pushes(list(self.layout.slots.values())))
        self._pushing.clear()

    def _push(
        self,
        slots: Sequence[Slot],
        values: Sequence[Tensor] | None,
        clock: int,
        pull: bool,
        samples: float | None,
        lrs: list[float],
        halt: bool,
        factor_rank: int,
        more: bool,
    ) -> list[Ticket]:
        busy = values is not None and not self._client.ready(self.pushes(slots))
        if values is not None and not busy:
            for slot, value in zip(slots, values, strict=True):
                place = self.arena.gradient(slot)
                if place.data_ptr() != value.data_ptr() or not value.is_contiguous():
                    place.copy_(value)
        tickets = []
        for route in self._route(slots):
            framed = busy or self._framed[route.server]
            frames: Sequence[Buffer] = ()
            if busy and values is not None:
                frames = self._copied(route, slots, values)
            elif framed:
                pieces = [_factors(slots[0], factor_rank)] if factor_rank else route.pieces
                frames = [self.arena.mirrors[piece.segment].gradient_bytes(piece) for piece in pieces]
            request = self._client.next_id()
            message = Push(request, clock, route.keys, samples, lrs, pull, framed, halt, factor_rank, more)
            places = self._places(route.pieces) if pull and framed else ()
            tickets.append(self._client.send(route.server, message, frames, places))
        keys = [slot.key for slot in slots]
        self._clocks |= dict.fromkeys(keys, clock + 1)
        self._pushing |= dict.fromkeys(keys, tickets)
        return tickets

    def _messages(self, slots: Sequence[Slot]) -> Iterator[tuple[int, list[int]]]:
        """What goes into one message: indices of slots at the same clock, and not too many bytes where they travel."""
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
                if batch and size + length > BATCH_BYTES:
                    yield clock, batch
                    batch, size = [], 0
                batch.append(index)
                size += length
            yield clock, batch

    def _copied(self, route: _Route, slots: Sequence[Slot], values: Sequence[Tensor]) -> list[memoryview]:
        """Values that cannot go through their place, because an earlier push still lies there."""
        frames = empty_frames(route.pieces, [segment.dtype for segment in self.layout.segments])
        for slot, value in zip(slots, values, strict=True):
            flat = value.reshape(-1)
            for piece in self.layout.pieces(slot, route.server):
                stop = min(piece.stop, slot.start + slot.length)
                if stop > piece.start:
                    part = flat[piece.start - slot.start : stop - slot.start]
                    frames.view(slot.segment, piece.start, stop).copy_(part)
        return frames.buffers()

    def _places(self, pieces: Sequence[Piece]) -> list[memoryview]:
        """Where the weights that come in an answer's frames live."""
        return [self.arena.mirrors[piece.segment].weight_bytes(piece) for piece in pieces]

    def _route(self, slots: Sequence[Slot]) -> list[_Route]:
        keys = tuple(slot.key for slot in slots)
        known = self._routes.get(keys)
        if known is None:
            known = []
            for server in range(self.layout.num_servers):
                parts = [(slot.key, self.layout.pieces(slot, server)) for slot in slots]
                here = [key for key, pieces in parts if pieces]
                if here:
                    pieces = frame_pieces(list(itertools.chain.from_iterable(pieces for _, pieces in parts)))
                    known.append(_Route(server, here, pieces))
            if len(self._routes) >= _REMEMBERED:
                self._routes.clear()
            self._routes[keys] = known
        return known

    def _offer(self, mirror: Mirror) -> None:
        """Let every server attach a new segment; one that cannot gets frames from now on."""
        for server in range(self.layout.num_servers):
            gradients, weights = mirror.gradient_block.descriptor, mirror.weight_block.descriptor
            if not self._framed[server] and gradients:
                request = Attach(self._client.next_id(), mirror.segment, gradients, weights)
                try:
                    self._client.call(server, request)
                    continue
                except UsageError:
                    self._events.write("frames", server=server, why="the server cannot attach this worker's memory")
            self._framed[server] = True


def _factors(slot: Slot, rank: int) -> Piece:
    """Where the factors of a gradient lie, as a piece to be sent."""
    return Piece(slot.segment, slot.start, slot.start + factors_length(slot, rank), 0)
