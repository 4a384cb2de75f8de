"""Messages survive encoding and any chunking of the bytes; other bytes raise Malformed and nothing else."""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, get_args, get_origin

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from echelon.cluster.messages import (
    Abort,
    ControlMessage,
    Halt,
    Malformed,
    Member,
    OptimizerSpec,
    Request,
    Response,
    decode_control,
    decode_request,
    decode_response,
    encode,
)
from echelon.cluster.placement import KeySpec, Segment, Slot
from echelon.transport.control import frame
from echelon.transport.framing import MAX_FRAME, FrameReader

Decode = Callable[[bytes | memoryview], Any]

INT_MIN, INT_MAX = -(2**63), 2**64 - 1
INTS = st.integers(INT_MIN, INT_MAX)
FLOATS = st.floats(allow_nan=False)
TEXT = st.text("ab/ \0\né漢🂡", max_size=12)
FEW: dict[str, Any] = {"max_size": 4}
OPTIONS = st.dictionaries(TEXT, st.one_of(FLOATS, INTS, st.booleans(), st.lists(FLOATS, **FEW), st.none()), **FEW)


@cache
def strategy(kind: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for all values of a type."""
    basic: dict[Any, st.SearchStrategy[Any]] = {
        int: INTS,
        float: FLOATS,
        str: TEXT,
        bytes: st.binary(max_size=12),
        bool: st.booleans(),
        type(None): st.none(),
        OptimizerSpec: st.builds(OptimizerSpec, TEXT, st.lists(OPTIONS, **FEW), st.dictionaries(TEXT, INTS, **FEW)),
    }
    if kind in basic:
        return basic[kind]
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return st.sampled_from(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return st.builds(kind, *(strategy(field.type) for field in msgspec.structs.fields(kind)))
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return constrained(*arguments)
    if origin is list:
        return st.lists(strategy(arguments[0]), **FEW)
    if origin is dict:
        return st.dictionaries(*map(strategy, arguments), **FEW)
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(strategy(arguments[0]), **FEW).map(tuple)
    if origin is tuple:
        return st.tuples(*map(strategy, arguments))
    return st.one_of(*map(strategy, arguments))  # a union


def constrained(kind: Any, meta: msgspec.Meta) -> st.SearchStrategy[Any]:
    """Return a strategy for the values of a type within limits. Texts and lists are always short here."""
    above = math.inf if meta.lt is None else meta.lt
    if kind is int:
        lowest, highest = meta.ge, meta.le if meta.lt is None else above - 1
        return st.integers(INT_MIN if lowest is None else int(lowest), INT_MAX if highest is None else int(highest))
    if kind is float:
        return st.floats(meta.ge, meta.le, exclude_max=False, allow_nan=False).filter(lambda number: number < above)
    return strategy(kind)


FAMILIES: list[tuple[Any, Decode]] = [
    (ControlMessage, decode_control),
    (Request, decode_request),
    (Response, decode_response),
]
KINDS = [pytest.param(kind, decode, id=kind.__name__) for family, decode in FAMILIES for kind in get_args(family)]
DECODERS = pytest.mark.parametrize("decode", [decode for _, decode in FAMILIES])
CONTROL = st.one_of(*map(strategy, get_args(ControlMessage)))
ANY_MESSAGE = st.one_of(*(strategy(kind) for family, _ in FAMILIES for kind in get_args(family)))


@pytest.mark.parametrize(("kind", "decode"), KINDS)
@settings(max_examples=25)
@given(data=st.data())
def test_every_kind_survives_encoding(kind: type, decode: Decode, data: st.DataObject) -> None:
    message = data.draw(strategy(kind))
    written = encode(message)
    assert decode(written) == message
    assert type(decode(written)) is kind
    assert decode(memoryview(written)) == message  # as a transport delivers it


def test_tags_are_unique() -> None:
    tags = [kind.__struct_config__.tag for family, _ in FAMILIES for kind in get_args(family)]
    assert len(set(tags)) == len(tags)


def only_malformed(decode: Decode, data: bytes) -> None:
    """Check that decoding returns a message or raises Malformed."""
    try:
        decode(data)
    except Malformed:
        pass


@DECODERS
@given(data=st.binary(max_size=60))
@example(data=b"")
@example(data=b"\x91" * 20_000)
@example(data=b"\x92\xa5Leave\xa3\xff\xfe\xfd")  # text that is not UTF-8
@example(data=b"\x91\xa5\xffeave")
@example(data=b"\x92\xa6Roster\xdd\xff\xff\xff\xff")  # four billion members announced
@example(data=b"\x94\xa9PutStates\x01\xdf\xff\xff\xff\xff")
def test_any_bytes_are_a_message_or_malformed(decode: Decode, data: bytes) -> None:
    only_malformed(decode, data)


@DECODERS
@given(message=ANY_MESSAGE, data=st.data())
def test_a_damaged_message_is_a_message_or_malformed(decode: Decode, message: Any, data: st.DataObject) -> None:
    written = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        written[data.draw(st.integers(0, len(written) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(written)))
    only_malformed(decode, bytes(written))
    only_malformed(decode, bytes(written[:cut]))


@pytest.mark.parametrize(
    ("decode", "other"), [(decode_control, Request), (decode_request, Response), (decode_response, ControlMessage)]
)
@settings(max_examples=20)
@given(data=st.data())
def test_a_message_of_another_family_is_malformed(decode: Decode, other: Any, data: st.DataObject) -> None:
    message = data.draw(st.one_of(*map(strategy, get_args(other))))
    with pytest.raises(Malformed):
        decode(encode(message))


@DECODERS
@given(data=st.binary(min_size=1, max_size=8))
def test_bytes_after_a_message_are_malformed(decode: Decode, data: bytes) -> None:
    family = next(family for family, known in FAMILIES if known is decode)
    kind = next(kind for kind in get_args(family) if kind.__name__ in ("Heartbeat", "Retire", "Placed"))
    empty: tuple[Any, ...] = {"Heartbeat": (), "Retire": (1,), "Placed": (1, [], [])}[kind.__name__]
    with pytest.raises(Malformed):
        decode(encode(kind(*empty)) + data)


# --- frames


def chunks(data: bytes, cuts: list[int]) -> list[bytes]:
    borders = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(borders)]


@given(st.lists(CONTROL, max_size=6), st.lists(st.integers(0, 10**6), max_size=20))
def test_frames_survive_any_chunking(messages: list[Any], cuts: list[int]) -> None:
    reader = FrameReader(decode_control)
    stream = b"".join(map(frame, messages))
    assert [message for chunk in chunks(stream, cuts) for message in reader.feed(chunk)] == messages


@settings(max_examples=20)
@given(st.lists(CONTROL, max_size=4))
def test_frames_can_be_read_byte_by_byte(messages: list[Any]) -> None:
    reader = FrameReader(decode_control)
    stream = b"".join(map(frame, messages))
    assert [message for byte in stream for message in reader.feed(bytes([byte]))] == messages


@given(CONTROL, CONTROL)
def test_a_message_is_returned_when_its_last_byte_arrives(first: Any, second: Any) -> None:
    reader = FrameReader(decode_control)
    stream = frame(first) + frame(second)
    assert list(reader.feed(stream[:-1])) == [first]
    assert list(reader.feed(stream[-1:])) == [second]


@given(st.lists(CONTROL, max_size=3), st.binary(min_size=1, max_size=20), st.lists(st.integers(0, 10**6), max_size=5))
def test_messages_before_a_bad_frame_are_returned(messages: list[Any], garbage: bytes, cuts: list[int]) -> None:
    bad = b"\xc1" + garbage  # a byte that MessagePack never uses
    stream = b"".join(map(frame, messages)) + struct.pack("!I", len(bad)) + bad
    reader = FrameReader(decode_control)
    seen: list[Any] = []

    def read() -> None:
        for chunk in chunks(stream, cuts):
            seen.extend(reader.feed(chunk))

    with pytest.raises(Malformed):
        read()
    assert seen == messages or seen == messages[: len(seen)]


@given(st.integers(MAX_FRAME + 1, 2**32 - 1))
def test_a_frame_that_is_too_long_is_rejected_before_it_is_read(length: int) -> None:
    with pytest.raises(Malformed, match=f"one of {length} bytes, and at most {MAX_FRAME}"):
        list(FrameReader(decode_control).feed(struct.pack("!I", length)))


def test_the_longest_frame_is_read() -> None:
    body = len(encode(Abort("x" * 70_000))) - 70_000
    message = Abort("x" * (MAX_FRAME - body))
    written = frame(message)
    assert len(written) == MAX_FRAME + 4
    assert list(FrameReader(decode_control).feed(written)) == [message]


# --- text and values


def test_the_text_of_a_member_is_its_role_rank_and_process() -> None:
    assert str(Member("worker", 3, "10.0.0.7", 4711, "tcp://10.0.0.7:9")) == "worker 3 (pid 4711 on 10.0.0.7)"


@pytest.mark.parametrize("message", [Halt("target"), Abort("server 0 died")])
def test_messages_are_immutable(message: Any) -> None:
    assert message == decode_control(encode(message))
    with pytest.raises(AttributeError):
        message.reason = "another"


def test_slots_and_segments_can_be_encoded() -> None:
    slot = Slot(3, KeySpec(7, (2, 3), "float16"), 0, 64, 6, 64)
    written = msgspec.msgpack.encode([slot, Segment(0, "float16", 4096, 4096)])
    assert msgspec.msgpack.decode(written, type=tuple[Slot, Segment]) == (slot, Segment(0, "float16", 4096, 4096))
