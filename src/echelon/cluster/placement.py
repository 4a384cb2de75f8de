"""Where keys live. Every process computes the same answer, so a push need not say where its bytes are.

Keys are laid end to end in *segments*, one dtype each; a worker mirrors a segment in memory (once for weights, once
for gradients) with the same offsets. A segment is cut into equal *stripes* dealt to the servers in turn, so that any
run of neighbouring keys (a bucket) is spread over all servers evenly by bytes; a big key is cut, a small one is not.

    segment   |key 0   |key 1 |key 2 ........................|key 3|
    stripes   |server 0|server 1|server 0|server 1|server 0|server 1|

A server stores its stripes packed. Keys start at multiples of ALIGN elements: kernels then treat every element alike
(no scalar tails in the middle), which is what makes runs over many keys bit-identical to one key at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

import msgspec

from echelon.errors import UsageError

ALIGN = 64
MIN_STRIPE = 4096
MAX_STRIPE = 262_144
SMALL_SEGMENT = 4_194_304  # elements reserved (not touched) for keys that come one by one
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
    """What a worker says a key is."""

    name: str | int
    shape: tuple[int, ...]
    dtype: str

    @property
    def length(self) -> int:
        """Elements."""
        return prod(self.shape)

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape)) or 'scalar'} {self.dtype}"


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """A run of memory of one dtype; `capacity` and `stripe` in elements."""

    index: int
    dtype: str
    capacity: int
    stripe: int


class Slot(msgspec.Struct, frozen=True, array_like=True):
    """A key and its place: elements [start, start + padded) of a segment, of which the first `length` are the key."""

    key: int
    spec: KeySpec
    segment: int
    start: int
    length: int
    padded: int


class Piece(NamedTuple):
    """Elements [start, stop) of a segment, all on one server, at `local` in that server's packed storage."""

    segment: int
    start: int
    stop: int
    local: int


class Layout:
    """Grows as keys are placed; placing never moves what was placed before."""

    def __init__(self, num_servers: int) -> None:
        if num_servers < 1:
            raise UsageError(f"a layout needs at least one server, not {num_servers}")
        self.num_servers = num_servers
        self.segments: list[Segment] = []
        self.slots: dict[int, Slot] = {}
        self._by_name: dict[str | int, int] = {}
        self._used: list[int] = []
        self._open: dict[str, int] = {}

    def find(self, name: str | int) -> Slot | None:
        """The slot of a key by its name."""
        key = self._by_name.get(name)
        return None if key is None else self.slots[key]

    def place(self, specs: Sequence[KeySpec]) -> list[Slot]:
        """Give every spec a slot; a name placed before keeps its slot if it is the same, and is refused if not."""
        fresh: dict[str | int, KeySpec] = {}
        for spec in specs:
            self._check(spec)
            if spec.name not in self._by_name and fresh.setdefault(spec.name, spec) != spec:
                raise UsageError(f"key {spec.name!r} is both {fresh[spec.name]} and {spec} in one call")
        for dtype in dict.fromkeys(spec.dtype for spec in fresh.values()):
            self._place_run([spec for spec in fresh.values() if spec.dtype == dtype])
        return [self.slots[self._by_name[spec.name]] for spec in specs]

    def adopt(self, segments: Iterable[Segment], slots: Iterable[Slot]) -> None:
        """Learn a layout that another process made."""
        for segment in segments:
            if segment.index == len(self.segments):
                self.segments.append(segment)
                self._used.append(segment.capacity)
        for slot in slots:
            if not 0 <= slot.segment < len(self.segments):
                raise UsageError(f"key {slot.spec.name!r} lies in segment {slot.segment}, which nobody has heard of")
            self.slots[slot.key] = slot
            self._by_name[slot.spec.name] = slot.key

    def pieces(self, slot: Slot, server: int, *, exact: bool = False) -> list[Piece]:
        """A key's parts on one server, in order. `exact` leaves the padding behind the key out."""
        stop = slot.start + (slot.length if exact else slot.padded)
        return cut(self.segments[slot.segment], slot.start, stop, server, self.num_servers)

    def stored(self, segment: Segment, server: int) -> int:
        """Elements of a segment that one server stores."""
        return sum(piece.stop - piece.start for piece in cut(segment, 0, segment.capacity, server, self.num_servers))

    def _check(self, spec: KeySpec) -> None:
        if spec.dtype not in ITEM_BYTES:
            raise UsageError(
                f"key {spec.name!r}: dtype {spec.dtype} cannot be stored; use one of {', '.join(ITEM_BYTES)}"
            )
        known = self.find(spec.name)
        if known is not None and known.spec != spec:
            raise UsageError(f"key {spec.name!r} is {known.spec} on the servers but {spec} on this worker")

    def _place_run(self, specs: list[KeySpec]) -> None:
        """Neighbours in one call are neighbours in memory, so that a bucket is one run."""
        dtype = specs[0].dtype
        total = sum(pad(spec.length) for spec in specs)
        index = self._open.get(dtype)
        if index is None or self._used[index] + total > self.segments[index].capacity:
            index = self._open_segment(dtype, total)
        for spec in specs:
            key = len(self.slots)
            slot = Slot(key, spec, index, self._used[index], spec.length, pad(spec.length))
            self._used[index] += slot.padded
            self.slots[key] = slot
            self._by_name[spec.name] = key

    def _open_segment(self, dtype: str, total: int) -> int:
        capacity = max(total, SMALL_SEGMENT) if total < MAX_STRIPE else total
        segment = Segment(len(self.segments), dtype, capacity, stripe_for(total, self.num_servers))
        self.segments.append(segment)
        self._used.append(0)
        self._open[dtype] = segment.index
        return segment.index


def pad(length: int) -> int:
    """A length rounded up to ALIGN, at least one ALIGN: even an empty key has a place."""
    return max(ALIGN, -(-length // ALIGN) * ALIGN)


def stripe_for(total: int, num_servers: int) -> int:
    """Stripes small enough to spread `total` elements evenly, big enough to be worth a call: a power of two."""
    wanted = max(1, total // (4 * num_servers))
    return min(MAX_STRIPE, max(MIN_STRIPE, 1 << (wanted - 1).bit_length()))


def cut(segment: Segment, start: int, stop: int, server: int, num_servers: int) -> list[Piece]:
    """The parts of [start, stop) that one server owns. Stripe j of segment i belongs to server (i + j) mod S."""
    stripe = segment.stripe
    first = start // stripe
    first += (server - segment.index - first) % num_servers
    pieces = []
    for j in range(first, -(-stop // stripe), num_servers):
        low, high = max(start, j * stripe), min(stop, (j + 1) * stripe)
        pieces.append(Piece(segment.index, low, high, (j // num_servers) * stripe + low - j * stripe))
    return pieces


def join(pieces: Iterable[Piece]) -> list[Piece]:
    """Merge neighbours: the same elements in as few pieces as may be."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last and (last.segment, last.stop, last.local + last.stop - last.start) == piece[:2] + piece[3:]:
            joined[-1] = Piece(last.segment, last.start, piece.stop, last.local)
        else:
            joined.append(piece)
    return joined
