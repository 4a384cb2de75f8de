"""Where each key is stored. Every process computes the same answer, so a push does not say where its bytes are.

Keys are laid end to end in *segments* of one dtype each. A worker mirrors a segment in its memory, once for weights and
once for gradients, with the same offsets. A segment is cut into equal *stripes*, which are assigned to the servers in
turn. So any run of neighbouring keys (a bucket) is spread over all servers evenly by bytes. Large keys are cut, small
ones are not.

    segment   |key 0   |key 1 |key 2 ........................|key 3|
    stripes   |server 0|server 1|server 0|server 1|server 0|server 1|

A row-sparse key (the table of an embedding) has a segment of its own, whose stripes are blocks of whole rows. It is not
mirrored: only rows travel (`server/rows.py`).

A key that an optimizer needs as a whole is on one server only. Such keys have segments of their own without stripes,
and each key goes to the server that has the fewest bytes of them.

A server stores its stripes packed. Keys start at multiples of ALIGN elements, so kernels treat every element alike (no
scalar tails in the middle). Therefore a run over many keys gives the same bits as one key at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import NamedTuple

import msgspec

from echelon.errors import UsageError

ALIGN = 64
MIN_STRIPE = 4096
MAX_STRIPE = 262_144
BLOCK_ROWS = 64  # of a row-sparse key: few enough that frequent rows, which often have low numbers, are spread
SMALL_SEGMENT = 4_194_304  # elements reserved, not written, for keys that are added one by one
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


class KeySpec(msgspec.Struct, frozen=True, array_like=True):
    """The name, shape and dtype of a key, as a worker declares them. `row_sparse`: it is stored and sent by rows."""

    name: str | int
    shape: tuple[int, ...]
    dtype: str
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

    index: int
    dtype: str
    capacity: int
    stripe: int
    row: int = 0


class Slot(msgspec.Struct, frozen=True, array_like=True):
    """A key and its place: elements [start, start + padded) of a segment; the first `length` belong to the key.

    `server` is the one that stores the key if it is not cut.
    """

    key: int
    spec: KeySpec
    segment: int
    start: int
    length: int
    padded: int
    server: int | None = None


class Piece(NamedTuple):
    """Elements [start, stop) of a segment on one server, stored from position `local` in its packed storage."""

    segment: int
    start: int
    stop: int
    local: int


class Layout:
    """All segments and slots. Placing new keys never moves existing ones."""

    def __init__(self, num_servers: int) -> None:
        if num_servers < 1:
            raise UsageError(f"a layout needs at least one server, not {num_servers}")
        self.num_servers = num_servers
        self.segments: list[Segment] = []
        self.slots: dict[int, Slot] = {}
        self._by_name: dict[str | int, int] = {}
        self._used: list[int] = []
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
        for kind in dict.fromkeys(kinds.values()):
            self._place_run([spec for name, spec in dense.items() if kinds[name] == kind], whole=kind[1])
        for spec in fresh.values():
            if spec.row_sparse:
                self._place_table(spec)
        return [self.slots[self._by_name[spec.name]] for spec in specs]

    def adopt(self, segments: Iterable[Segment], slots: Iterable[Slot]) -> None:
        """Add segments and slots that another process placed."""
        for segment in segments:
            if segment.index == len(self.segments):
                self.segments.append(segment)
                self._used.append(segment.capacity)
        for slot in slots:
            if not 0 <= slot.segment < len(self.segments):
                raise UsageError(
                    f"key {slot.spec.name!r} is in segment {slot.segment}, but only {len(self.segments)} segments exist"
                )
            self.slots[slot.key] = slot
            self._by_name[slot.spec.name] = slot.key

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
        return sum(piece.stop - piece.start for piece in cut(segment, 0, segment.capacity, server, self.num_servers))

    def _check(self, spec: KeySpec) -> None:
        if spec.dtype not in ITEM_BYTES:
            raise UsageError(
                f"key {spec.name!r}: dtype {spec.dtype} cannot be stored; use one of {', '.join(ITEM_BYTES)}"
            )
        if spec.row_sparse and not spec.length:
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
            key = len(self.slots)
            server = servers.get(spec.name)
            slot = Slot(key, spec, index, self._used[index], spec.length, pad(spec.length), server)
            self._used[index] += slot.padded
            self.slots[key] = slot
            self._by_name[spec.name] = key

    def _place_table(self, spec: KeySpec) -> None:
        """Place a row-sparse key in a segment of its own, whose stripes are blocks of rows."""
        row = prod(spec.shape[1:])
        stripe = BLOCK_ROWS * row
        capacity = -(-spec.length // stripe) * stripe
        segment = Segment(len(self.segments), spec.dtype, capacity, stripe, row)
        self.segments.append(segment)
        self._used.append(capacity)
        key = len(self.slots)
        self.slots[key] = Slot(key, spec, segment.index, 0, spec.length, capacity)
        self._by_name[spec.name] = key

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
        self.segments.append(segment)
        self._used.append(0)
        self._open[dtype, whole] = segment.index
        return segment.index


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
