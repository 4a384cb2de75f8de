"""Where each key is stored. Every process computes the same answer, so a push does not say where its bytes are.

Keys are laid end to end in *segments* of one dtype each. A worker mirrors a segment in its memory, once for weights and
once for gradients, with the same offsets. A segment is cut into equal *stripes*, which are assigned to the servers in
turn. So any run of neighbouring keys (a bucket) is spread over all servers evenly by bytes. Large keys are cut, small
ones are not.

    segment   |key 0   |key 1 |key 2 ........................|key 3|
    stripes   |server 0|server 1|server 0|server 1|server 0|server 1|

A row-sparse key (the table of an embedding) has a segment of its own, whose stripes are blocks of whole rows. It is not
mirrored: only rows travel (`server/storage/rows.py`).

A key that an optimizer needs as a whole is on one server only. Such keys have segments of their own without stripes,
and each key goes to the server that has the fewest bytes of them.

A server stores its stripes packed. Keys start at multiples of ALIGN elements, so kernels treat every element alike (no
scalar tails in the middle). Therefore a run over many keys gives the same bits as one key at a time.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from echelon.errors import UsageError

ALIGN = 64
MIN_STRIPE = 4096
MAX_STRIPE = 262_144
BLOCK_ROWS = 64  # of a row-sparse key: few enough that frequent rows, which often have low numbers, are spread
SMALL_SEGMENT = 4_194_304  # elements reserved, not written, for keys that are added one by one
MAX_KEYS = 1 << 18  # in one message
MAX_DIMENSIONS = 32
MAX_NAME = 4096  # characters
MAX_LENGTH = 1 << 40  # elements of a key
UNLIMITED = 1 << 62  # bytes
ITEM_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float64": 8,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
}


Natural = Annotated[int, Meta(ge=0, lt=1 << 62)]  # checked where messages are decoded
DtypeName = Annotated[str, Meta(max_length=16)]


class KeySpec(msgspec.Struct, frozen=True, array_like=True):
    """The name, shape and dtype of a key, as a worker declares them. `row_sparse`: it is stored and sent by rows."""

    name: Annotated[str, Meta(max_length=MAX_NAME)] | int
    shape: Annotated[tuple[Natural, ...], Meta(max_length=MAX_DIMENSIONS)]
    dtype: DtypeName
    row_sparse: bool = False

    @property
    def length(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape)) or 'scalar'} {self.dtype}{' by rows' if self.row_sparse else ''}"


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """A range of memory of one dtype; `capacity` and `stripe` are in elements.

    `stripe` 0: its keys are not cut. `row`: of a row-sparse key, else 0.
    """

    index: Natural
    dtype: DtypeName
    capacity: Natural
    stripe: Natural
    row: Natural = 0


class Slot(msgspec.Struct, frozen=True, array_like=True):
    """A key and its place: elements [start, start + padded) of a segment; the first `length` belong to the key.

    `server` is the one that stores the key if it is not cut.
    """

    key: Natural
    spec: KeySpec
    segment: Natural
    start: Natural
    length: Natural
    padded: Natural
    server: Natural | None = None


class Piece(NamedTuple):
    """Elements [start, stop) of a segment on one server, stored from position `local` in its packed storage."""

    segment: int
    start: int
    stop: int
    local: int


class Layout:
    """All segments and slots. Placing new keys never moves existing ones."""

    def __init__(self, num_servers: int, max_bytes: int = UNLIMITED) -> None:
        """`max_bytes`: what all servers together can store."""
        if num_servers < 1:
            raise UsageError(f"a layout needs at least one server, not {num_servers}")
        self.num_servers = num_servers
        self.max_bytes = max_bytes
        self._num_bytes = 0  # of all segments
        self.segments: list[Segment] = []
        self.slots: dict[int, Slot] = {}
        self._by_name: dict[str | int, int] = {}
        self._used: list[int] = []
        self._ranges: dict[int, list[tuple[int, int]]] = {}  # by segment: start and stop of its slots, ascending
        self._open: dict[tuple[str, bool], int] = {}  # by dtype, and whether keys are whole
        self._whole_bytes = [0] * num_servers

    def find(self, name: str | int) -> Slot | None:
        """Return the slot of a key by its name, or None."""
        key = self._by_name.get(name)
        return None if key is None else self.slots[key]

    def place(self, specs: Sequence[KeySpec], is_whole: Callable[[KeySpec], bool] = lambda _: False) -> list[Slot]:
        """Return a slot for every spec. An existing key keeps its slot; a different spec for it raises UsageError.

        `is_whole`: whether all of a new key must be on one server.
        """
        fresh: dict[str | int, KeySpec] = {}
        for spec in specs:
            self._check(spec)
            if spec.name not in self._by_name and fresh.setdefault(spec.name, spec) != spec:
                raise UsageError(f"key {spec.name!r} is both {fresh[spec.name]} and {spec} in one call")
        dense = {name: spec for name, spec in fresh.items() if not spec.row_sparse}
        kinds = {name: (spec.dtype, is_whole(spec)) for name, spec in dense.items()}
        self._check_bytes(sum(pad(spec.length) * ITEM_BYTES[spec.dtype] for spec in fresh.values()))
        for kind in dict.fromkeys(kinds.values()):
            self._place_run([spec for name, spec in dense.items() if kinds[name] == kind], whole=kind[1])
        for spec in fresh.values():
            if spec.row_sparse:
                self._place_table(spec)
        return [self.slots[self._by_name[spec.name]] for spec in specs]

    def adopt(self, segments: Iterable[Segment], slots: Iterable[Slot]) -> None:
        """Add segments and slots that another process placed. UsageError: one is invalid, and none was added."""
        with self.adopting(segments, slots):
            pass

    @contextmanager
    def adopting(self, segments: Iterable[Segment], slots: Iterable[Slot]) -> Iterator[None]:
        """Adopt segments and slots, and remove the new ones again if the block raises an exception."""
        num_segments, added = len(self.segments), list[Slot]()
        try:
            for segment in segments:
                self._adopt_segment(segment)
            for slot in slots:
                if self._adopt_slot(slot):
                    added.append(slot)
            yield
        except BaseException:
            for slot in added:
                self._remove_slot(slot)
            self._num_bytes -= sum(map(_fewest_bytes, self.segments[num_segments:]))
            del self.segments[num_segments:], self._used[num_segments:]
            raise

    def _adopt_segment(self, segment: Segment) -> None:
        if segment.index < len(self.segments):
            if segment != self.segments[segment.index]:
                raise UsageError(f"segment {segment.index} is {self.segments[segment.index]} here, not {segment}")
            return
        if segment.index > len(self.segments) or not _is_possible(segment, self.num_servers):
            raise UsageError(f"{segment} cannot be segment {len(self.segments)} of {self.num_servers} servers")
        self._check_bytes(_fewest_bytes(segment))
        self._add_segment(segment, used=segment.capacity)

    def _adopt_slot(self, slot: Slot) -> bool:
        """Add a slot. Return False if it is known."""
        if self.slots.get(slot.key) == slot:
            return False
        self._check(slot.spec)
        if slot.key in self.slots or slot.spec.name in self._by_name:
            known = self.slots.get(slot.key) or self.slots[self._by_name[slot.spec.name]]
            raise UsageError(f"key {slot.spec.name!r} is {slot} on the worker, but {known} is on the servers")
        if slot.segment >= len(self.segments):
            raise UsageError(
                f"key {slot.spec.name!r} is in segment {slot.segment}, but only {len(self.segments)} segments exist"
            )
        if not _fits(slot, self.segments[slot.segment], self.num_servers):
            raise UsageError(f"key {slot.spec.name!r} cannot be {slot} in {self.segments[slot.segment]}")
        self._add_slot(slot)
        return True

    def _add_segment(self, segment: Segment, *, used: int) -> None:
        self.segments.append(segment)
        self._used.append(used)
        self._num_bytes += _fewest_bytes(segment)

    def _add_slot(self, slot: Slot) -> None:
        """Record a slot. Raise UsageError if its place is taken."""
        ranges = self._ranges.setdefault(slot.segment, [])
        own = (slot.start, slot.start + slot.padded)
        at = bisect_left(ranges, own)
        if (at and ranges[at - 1][1] > own[0]) or (at < len(ranges) and ranges[at][0] < own[1]):
            raise UsageError(f"key {slot.spec.name!r}: elements {own[0]} to {own[1]} belong to another key")
        insort(ranges, own)
        self.slots[slot.key] = slot
        self._by_name[slot.spec.name] = slot.key

    def _remove_slot(self, slot: Slot) -> None:
        self._ranges[slot.segment].remove((slot.start, slot.start + slot.padded))
        del self.slots[slot.key], self._by_name[slot.spec.name]

    def to_plain(self) -> dict[str, Any]:
        """Return what is needed to place more keys, as numbers and lists, beside segments and slots."""
        opened = [[dtype, whole, index] for (dtype, whole), index in self._open.items()]
        return {"used": self._used, "open": opened, "whole_bytes": self._whole_bytes}

    def load_plain(self, plain: dict[str, Any]) -> None:
        """Take over what `to_plain` returned. Segments and slots are adopted already."""
        self._used, self._whole_bytes = list(plain["used"]), list(plain["whole_bytes"])
        self._open = {(dtype, whole): index for dtype, whole, index in plain["open"]}

    def pieces(self, slot: Slot, server: int, *, exact: bool = False) -> list[Piece]:
        """Return the pieces of a key on one server, in order. `exact` excludes the padding after the key."""
        stop = slot.start + (slot.length if exact else slot.padded)
        if slot.server is not None:
            return [Piece(slot.segment, slot.start, stop, slot.start)] if slot.server == server else []
        return cut(self.segments[slot.segment], slot.start, stop, server, self.num_servers)

    def stored(self, segment: Segment, server: int) -> int:
        """Return for how many elements of a segment one server reserves memory: whole keys are not packed."""
        if not segment.stripe:
            return segment.capacity
        stripes = -(-segment.capacity // segment.stripe)
        turn = (server - segment.index) % self.num_servers
        here = len(range(turn, stripes, self.num_servers))
        has_last = here > 0 and (stripes - 1) % self.num_servers == turn
        return here * segment.stripe - (stripes * segment.stripe - segment.capacity if has_last else 0)

    def _check_bytes(self, more: int) -> None:
        """Raise UsageError if the servers cannot store so many bytes more."""
        total = more + self._num_bytes
        if total > self.max_bytes:
            raise UsageError(
                f"the keys need {total / 1e9:.1f} GB, but {self.num_servers} servers with the memory of this machine "
                f"have {self.max_bytes / 1e9:.1f} GB; start more servers on other machines"
            )

    def _check(self, spec: KeySpec) -> None:
        if spec.dtype not in ITEM_BYTES:
            raise UsageError(
                f"key {spec.name!r}: dtype {spec.dtype} cannot be stored; use one of {', '.join(ITEM_BYTES)}"
            )
        if spec.length > MAX_LENGTH:
            raise UsageError(f"key {spec.name!r} is {spec}; a key can have at most {MAX_LENGTH} elements")
        if spec.row_sparse and not (spec.shape and spec.length):
            raise UsageError(f"key {spec.name!r} is {spec}; a row-sparse key needs rows of at least one element")
        known = self.find(spec.name)
        if known is not None and known.spec != spec:
            raise UsageError(f"key {spec.name!r} is {known.spec} on the servers but {spec} on this worker")

    def _place_run(self, specs: list[KeySpec], *, whole: bool) -> None:
        """Place keys next to each other, so that a bucket is one run of memory."""
        dtype = specs[0].dtype
        total = sum(pad(spec.length) for spec in specs)
        index = self._open.get((dtype, whole))
        if index is None or self._used[index] + total > self.segments[index].capacity:
            index = self._open_segment(dtype, total, whole=whole)
        servers = self._spread(specs) if whole else {}
        for spec in specs:
            server = servers.get(spec.name)
            slot = Slot(len(self.slots), spec, index, self._used[index], spec.length, pad(spec.length), server)
            self._used[index] += slot.padded
            self._add_slot(slot)

    def _place_table(self, spec: KeySpec) -> None:
        """Place a row-sparse key in a segment of its own, whose stripes are blocks of rows."""
        row = prod(spec.shape[1:])
        stripe = BLOCK_ROWS * row
        capacity = -(-spec.length // stripe) * stripe
        segment = Segment(len(self.segments), spec.dtype, capacity, stripe, row)
        self._add_segment(segment, used=capacity)
        self._add_slot(Slot(len(self.slots), spec, segment.index, 0, spec.length, capacity))

    def _spread(self, specs: Sequence[KeySpec]) -> dict[str | int, int]:
        """Assign whole keys to servers, the largest first, each to the server with the fewest bytes."""
        found = {}
        for spec in sorted(specs, key=lambda spec: -spec.length):
            server = self._whole_bytes.index(min(self._whole_bytes))
            self._whole_bytes[server] += pad(spec.length) * ITEM_BYTES[spec.dtype]
            found[spec.name] = server
        return found

    def _open_segment(self, dtype: str, total: int, *, whole: bool) -> int:
        capacity = max(total, SMALL_SEGMENT) if total < MAX_STRIPE else total
        stripe = 0 if whole else stripe_for(total, self.num_servers)
        segment = Segment(len(self.segments), dtype, capacity, stripe)
        self._add_segment(segment, used=0)
        self._open[dtype, whole] = segment.index
        return segment.index


def _is_possible(segment: Segment, num_servers: int) -> bool:
    """Return whether `Layout.place` can make a segment like this."""
    capacity, stripe = segment.capacity, segment.stripe
    if segment.dtype not in ITEM_BYTES or not 0 < capacity <= MAX_LENGTH + BLOCK_ROWS * MAX_LENGTH:
        return False
    if segment.row:
        return stripe == BLOCK_ROWS * segment.row and capacity % stripe == 0
    if capacity % ALIGN:
        return False
    if capacity == SMALL_SEGMENT:
        return stripe == 0 or (MIN_STRIPE <= stripe <= MAX_STRIPE and stripe.bit_count() == 1)
    return stripe in (0, stripe_for(capacity, num_servers))


def _fewest_bytes(segment: Segment) -> int:
    """Return the bytes that a segment needs at least: the last block of a table may have one row only."""
    missing = segment.stripe - segment.row if segment.row else 0
    return (segment.capacity - missing) * ITEM_BYTES[segment.dtype]


def _fits(slot: Slot, segment: Segment, num_servers: int) -> bool:
    """Return whether a slot is in its segment as `Layout.place` puts it there."""
    spec = slot.spec
    if (spec.dtype, spec.length, spec.row_sparse) != (segment.dtype, slot.length, segment.row > 0):
        return False
    if spec.row_sparse:
        whole = slot.start == 0 and slot.padded == segment.capacity
        return whole and segment.row == prod(spec.shape[1:]) and slot.length <= slot.padded and slot.server is None
    servers = (None,) if segment.stripe else range(num_servers)
    aligned = slot.start % ALIGN == 0 and slot.padded == pad(slot.length)
    return aligned and slot.start + slot.padded <= segment.capacity and slot.server in servers


def pad(length: int) -> int:
    """Round a length up to a multiple of ALIGN. Even an empty key gets one ALIGN."""
    return max(ALIGN, -(-length // ALIGN) * ALIGN)


def stripe_for(total: int, num_servers: int) -> int:
    """Return the stripe length, a power of two: short enough for an even spread, long enough to limit the calls."""
    wanted = max(1, total // (4 * num_servers))
    return min(MAX_STRIPE, max(MIN_STRIPE, 1 << (wanted - 1).bit_length()))


def cut(segment: Segment, start: int, stop: int, server: int, num_servers: int) -> list[Piece]:
    """Return the pieces of [start, stop) on one server. Stripe j of segment i belongs to server (i + j) mod S."""
    stripe = segment.stripe
    first = start // stripe
    first += (server - segment.index - first) % num_servers
    pieces = []
    for j in range(first, -(-stop // stripe), num_servers):
        low, high = max(start, j * stripe), min(stop, (j + 1) * stripe)
        pieces.append(Piece(segment.index, low, high, (j // num_servers) * stripe + low - j * stripe))
    return pieces


def join(pieces: Iterable[Piece]) -> list[Piece]:
    """Merge neighbouring pieces: the same elements in as few pieces as possible."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last and (last.segment, last.stop, last.local + last.stop - last.start) == piece[:2] + piece[3:]:
            joined[-1] = Piece(last.segment, last.start, piece.stop, last.local)
        else:
            joined.append(piece)
    return joined
