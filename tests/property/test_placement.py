"""Placement of any keys, in any number of calls, on any number of servers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.cluster.placement import (
    ALIGN,
    ITEM_BYTES,
    MAX_STRIPE,
    MIN_STRIPE,
    SMALL_SEGMENT,
    KeySpec,
    Layout,
    Piece,
    Segment,
    Slot,
    cut,
    join,
    pad,
    stripe_for,
)
from echelon.errors import UsageError

# empty, within one ALIGN, about a stripe, many stripes, more than a small segment
LENGTHS = st.one_of(
    st.integers(0, 200),
    st.integers(MIN_STRIPE - 70, MIN_STRIPE + 70),
    st.integers(10_000, 600_000),
    st.integers(SMALL_SEGMENT - 70, SMALL_SEGMENT + 70),
)
DTYPES = st.sampled_from(["float32", "float16", "int64"])
SERVERS = st.integers(1, 5)


@st.composite
def calls(draw: st.DrawFn) -> list[list[KeySpec]]:
    """Calls of place() with unique names."""
    sizes = draw(st.lists(st.lists(st.tuples(LENGTHS, DTYPES), min_size=1, max_size=6), min_size=1, max_size=5))
    named: list[list[KeySpec]] = []
    count = 0
    for call in sizes:
        named.append([])
        for length, dtype in call:
            name: str | int = count if count % 2 else f"key{count}"
            shape = (2, length // 2) if length % 2 == 0 and count % 3 == 0 else (length,)
            named[-1].append(KeySpec(name, shape, dtype))
            count += 1
    return named


def placed(sequence: Iterable[list[KeySpec]], servers: int) -> Layout:
    layout = Layout(servers)
    for specs in sequence:
        layout.place(specs)
    return layout


def spans(pieces: Iterable[Piece]) -> list[tuple[int, int]]:
    return [(piece.start, piece.stop) for piece in pieces]


def is_partition(parts: Iterable[tuple[int, int]], start: int, stop: int) -> bool:
    """Return whether non-empty ranges cover [start, stop) without overlap."""
    ordered = sorted(part for part in parts if part[0] != part[1])
    if not ordered:
        return start == stop
    return ordered[0][0] == start and ordered[-1][1] == stop and all(a[1] == b[0] for a, b in pairwise(ordered))


def state(layout: Layout) -> tuple[list[Segment], dict[int, Slot]]:
    return list(layout.segments), dict(layout.slots)


@given(calls(), SERVERS)
def test_slots_are_aligned_disjoint_and_inside_their_segment(sequence: list[list[KeySpec]], servers: int) -> None:
    layout = placed(sequence, servers)
    assert sorted(layout.slots) == list(range(sum(map(len, sequence))))
    for key, slot in layout.slots.items():
        segment = layout.segments[slot.segment]
        assert slot.key == key
        assert segment.index == slot.segment
        assert segment.dtype == slot.spec.dtype
        assert slot.start % ALIGN == slot.padded % ALIGN == 0
        assert slot.length == slot.spec.length <= slot.padded
        assert 0 < slot.padded < max(1, slot.length) + ALIGN
        assert slot.start + slot.padded <= segment.capacity
    ends = sorted((slot.segment, slot.start, slot.start + slot.padded) for slot in layout.slots.values())
    assert all(a[0] != b[0] or a[2] <= b[1] for a, b in pairwise(ends))


@given(calls(), SERVERS)
def test_neighbours_in_a_call_are_neighbours_in_memory(sequence: list[list[KeySpec]], servers: int) -> None:
    layout = Layout(servers)
    for specs in sequence:
        slots = layout.place(specs)
        assert [slot.spec for slot in slots] == specs
        for dtype in {spec.dtype for spec in specs}:
            run = [slot for slot in slots if slot.spec.dtype == dtype]
            assert all(a.segment == b.segment and a.start + a.padded == b.start for a, b in pairwise(run))


@given(calls(), SERVERS)
def test_placing_keys_moves_no_existing_key(sequence: list[list[KeySpec]], servers: int) -> None:
    layout = Layout(servers)
    for specs in sequence:
        before = state(layout)
        layout.place(specs)
        assert layout.segments[: len(before[0])] == before[0]
        assert layout.slots.items() >= before[1].items()
    everything = [spec for specs in sequence for spec in specs]
    before = state(layout)
    assert [slot.spec for slot in layout.place(everything[::-1])] == everything[::-1]
    assert state(layout) == before
    assert all(layout.find(spec.name) == layout.slots[key] for key, spec in enumerate(order(sequence)))


def order(sequence: list[list[KeySpec]]) -> list[KeySpec]:
    """Return the specs in the order of their key numbers: by call, then by dtype."""
    numbered: list[KeySpec] = []
    for specs in sequence:
        for dtype in dict.fromkeys(spec.dtype for spec in specs):
            numbered += [spec for spec in specs if spec.dtype == dtype]
    return numbered


@given(calls(), SERVERS, st.booleans())
def test_the_servers_share_a_key_without_gap_or_overlap(
    sequence: list[list[KeySpec]], servers: int, exact: bool
) -> None:
    layout = placed(sequence, servers)
    for slot in layout.slots.values():
        parts = [layout.pieces(slot, server, exact=exact) for server in range(servers)]
        stop = slot.start + (slot.length if exact else slot.padded)
        assert is_partition([span for pieces in parts for span in spans(pieces)], slot.start, stop)
        assert all(piece.segment == slot.segment for pieces in parts for piece in pieces)
        assert all(spans(pieces) == sorted(spans(pieces)) for pieces in parts)


@given(calls(), SERVERS)
def test_a_server_stores_its_parts_packed(sequence: list[list[KeySpec]], servers: int) -> None:
    layout = placed(sequence, servers)
    for segment in layout.segments:
        stored = [layout.stored(segment, server) for server in range(servers)]
        assert sum(stored) == segment.capacity
        for server in range(servers):
            whole = cut(segment, 0, segment.capacity, server, servers)
            local = [(piece.local, piece.local + piece.stop - piece.start) for piece in whole]
            assert is_partition(local, 0, stored[server])  # no gap, no overlap
            for slot in (slot for slot in layout.slots.values() if slot.segment == segment.index):
                for piece in layout.pieces(slot, server):
                    home = next(p for p in whole if p.start <= piece.start and piece.stop <= p.stop)
                    assert piece.local - home.local == piece.start - home.start
                    assert piece.local % ALIGN == 0


@given(st.lists(st.tuples(LENGTHS, st.just("float32")), min_size=1, max_size=12), SERVERS, st.integers(0, 10))
def test_a_call_is_spread_evenly(sizes: list[tuple[int, str]], servers: int, before: int) -> None:
    """The part of a call on each server differs from an even share by at most one stripe."""
    layout = Layout(servers)
    for number in range(before):
        layout.place([KeySpec(f"before {number}", (5000,), "float32")])
    slots = layout.place([KeySpec(number, (length,), dtype) for number, (length, dtype) in enumerate(sizes)])
    total = sum(slot.padded for slot in slots)
    stripe = layout.segments[slots[0].segment].stripe
    for server in range(servers):
        share = sum(piece.stop - piece.start for slot in slots for piece in layout.pieces(slot, server))
        assert abs(share - total / servers) <= stripe
        if total >= 64 * MIN_STRIPE * servers:  # here a stripe is small compared with the share
            assert share >= total / servers * 0.4


@given(calls(), SERVERS, st.booleans())
def test_a_whole_key_is_on_one_server(sequence: list[list[KeySpec]], servers: int, exact: bool) -> None:
    layout = Layout(servers)
    bytes_of = [0] * servers
    largest = 0
    for specs in sequence:
        for slot in layout.place(specs, lambda spec: spec.dtype != "int64"):
            parts = [layout.pieces(slot, server, exact=exact) for server in range(servers)]
            is_whole = slot.spec.dtype != "int64"
            assert (slot.server is not None) == (layout.segments[slot.segment].stripe == 0) == is_whole
            if slot.server is not None:
                stop = slot.start + (slot.length if exact else slot.padded)
                assert parts[slot.server] == [Piece(slot.segment, slot.start, stop, slot.start)]
                assert not any(pieces for server, pieces in enumerate(parts) if server != slot.server)
                assert stop <= layout.stored(layout.segments[slot.segment], slot.server)
                bytes_of[slot.server] += slot.padded * ITEM_BYTES[slot.spec.dtype]
                largest = max(largest, slot.padded * ITEM_BYTES[slot.spec.dtype])
    assert max(bytes_of) - min(bytes_of) <= largest, "each key goes to the server with the fewest bytes"


@given(st.integers(0, 10**9), SERVERS)
def test_stripes_are_powers_of_two_within_limits(total: int, servers: int) -> None:
    stripe = stripe_for(total, servers)
    assert MIN_STRIPE <= stripe <= MAX_STRIPE
    assert stripe & (stripe - 1) == 0
    assert stripe == MIN_STRIPE or stripe * servers * 2 <= total + 8 * servers  # at least two stripes per server


@given(calls(), SERVERS)
def test_join_keeps_the_elements(sequence: list[list[KeySpec]], servers: int) -> None:
    layout = placed(sequence, servers)
    for server in range(servers):
        pieces = [piece for slot in layout.slots.values() for piece in layout.pieces(slot, server)]
        joined = join(pieces)
        assert len(joined) <= len(pieces)
        assert list(apart(joined, pieces)) == pieces
        assert not any(follows(a, b) for a, b in pairwise(joined))
        assert join(joined) == joined


def follows(one: Piece, other: Piece) -> bool:
    length = one.stop - one.start
    return (one.segment, one.stop, one.local + length) == (other.segment, other.start, other.local)


def apart(joined: list[Piece], like: list[Piece]) -> Iterator[Piece]:
    """Cut joined pieces again at the boundaries of the original pieces."""
    lengths = iter(piece.stop - piece.start for piece in like)
    for segment, start, stop, local in joined:
        at = start
        while at < stop:
            length = next(lengths)
            yield Piece(segment, at, at + length, local + at - start)
            at += length


@given(calls(), SERVERS)
def test_adopting_gives_the_same_layout(sequence: list[list[KeySpec]], servers: int) -> None:
    """A process that receives the segments and slots, even repeatedly, computes the same pieces."""
    mine, theirs = Layout(servers), Layout(servers)
    for specs in sequence:
        slots = mine.place(specs)
        theirs.adopt(mine.segments, slots)
        theirs.adopt(mine.segments[-1:], slots[:1])
    assert state(theirs) == state(mine)
    for slot in mine.slots.values():
        assert theirs.find(slot.spec.name) == slot
        for server in range(servers):
            assert theirs.pieces(slot, server) == mine.pieces(slot, server)
    for segment in mine.segments:
        assert [theirs.stored(segment, s) for s in range(servers)] == [mine.stored(segment, s) for s in range(servers)]


@given(calls(), SERVERS, st.data())
def test_a_different_spec_is_rejected_and_changes_nothing(
    sequence: list[list[KeySpec]], servers: int, data: st.DataObject
) -> None:
    layout = placed(sequence, servers)
    known = data.draw(st.sampled_from([spec for specs in sequence for spec in specs]))
    changes = {"longer": (*known.shape, 3), "scalar": (), "dtype": known.shape}
    kind = data.draw(st.sampled_from(sorted(changes)))
    other = KeySpec(known.name, changes[kind], "uint8" if kind == "dtype" else known.dtype)
    before = state(layout)
    with pytest.raises(UsageError) as refused:
        layout.place([KeySpec("fresh", (7,), "float32"), other])
    assert state(layout) == before
    assert layout.find("fresh") is None
    assert repr(known.name) in str(refused.value)
    assert f"{known} on the servers but {other} on this worker" in str(refused.value)


def test_one_call_cannot_give_a_name_two_shapes() -> None:
    layout = Layout(2)
    with pytest.raises(UsageError, match="key 'a' is both 3 float32 and 2x2 float32"):
        layout.place([KeySpec("a", (3,), "float32"), KeySpec("a", (2, 2), "float32")])
    assert state(layout) == ([], {})


def test_a_name_twice_in_a_call_is_one_key() -> None:
    layout = Layout(1)
    spec = KeySpec("a", (3,), "float32")
    one, other = layout.place([spec, spec])
    assert one is other
    assert len(layout.slots) == 1


def test_a_string_and_an_integer_are_different_names() -> None:
    layout = Layout(1)
    one, other = layout.place([KeySpec("1", (3,), "float32"), KeySpec(1, (4,), "float32")])
    assert (one.key, other.key) == (0, 1)


def test_an_unknown_dtype_is_rejected_with_the_known_ones() -> None:
    layout = Layout(1)
    with pytest.raises(UsageError, match="key 'a': dtype complex64 cannot be stored; use one of float32"):
        layout.place([KeySpec("b", (1,), "float32"), KeySpec("a", (3,), "complex64")])
    assert state(layout) == ([], {})


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_every_dtype_has_segments_of_its_own(dtype: str) -> None:
    layout = Layout(3)
    layout.place([KeySpec("first", (10,), "float32"), KeySpec("second", (10,), dtype), KeySpec("third", (), "float32")])
    assert [segment.dtype for segment in layout.segments] == list(dict.fromkeys(["float32", dtype]))


def test_keys_that_are_added_one_by_one_share_a_segment() -> None:
    layout = Layout(2)
    for number in range(100):
        layout.place([KeySpec(number, (1000,), "float32")])
    assert len(layout.segments) == 1


def test_small_segments_do_not_all_start_on_one_server() -> None:
    layout = Layout(2)
    slots = layout.place([KeySpec(dtype, (5,), dtype) for dtype in ("float32", "float16", "int64")])
    assert [[bool(layout.pieces(slot, server)) for server in range(2)] for slot in slots] == [
        [True, False],
        [False, True],
        [True, False],
    ]


def test_a_layout_needs_a_server() -> None:
    with pytest.raises(UsageError, match="at least one server, not 0"):
        Layout(0)


@pytest.mark.parametrize(("length", "padded"), [(0, 64), (1, 64), (64, 64), (65, 128), (128, 128)])
def test_pad(length: int, padded: int) -> None:
    assert pad(length) == padded


def test_the_text_of_a_spec_is_its_shape_and_dtype() -> None:
    assert str(KeySpec("a", (64, 3, 7, 7), "float16")) == "64x3x7x7 float16"
    assert str(KeySpec("a", (), "float32")) == "scalar float32"
    assert KeySpec("a", (), "float32").length == 1
