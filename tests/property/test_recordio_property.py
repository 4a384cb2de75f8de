"""RecordIO with arbitrary bytes: records round-trip, and damage is always reported."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from echelon.data.records import frame
from echelon.data.records.image_header import Header, pack, unpack

MAGIC = frame.MAGIC_BYTES
# Pieces of the magic word at every alignment could confuse an encoder.
PIECES = st.sampled_from([MAGIC, MAGIC, MAGIC[:1], MAGIC[1:], MAGIC[:3], b"\0", b"word"]) | st.binary(max_size=9)
PAYLOADS = st.lists(PIECES, max_size=12).map(b"".join)
FILES = st.lists(PAYLOADS, min_size=1, max_size=6)


def read_all(data: bytes) -> tuple[list[bytes], int]:
    """Return the records before the first fault, and the offset after them."""
    records: list[bytes] = []
    at = 0
    try:
        while at < len(data):
            payload, at = frame.decode(memoryview(data), at)
            records.append(bytes(payload))
    except frame.FrameError as error:
        return records, error.offset
    return records, at


@given(FILES)
def test_round_trip(payloads: list[bytes]) -> None:
    data = b"".join(map(frame.encode, payloads))
    assert len(data) % 4 == 0
    assert read_all(data) == (payloads, len(data))


@given(FILES)
def test_every_aligned_magic_word_is_a_head_and_every_record_is_found(payloads: list[bytes]) -> None:
    frames = list(map(frame.encode, payloads))
    data = memoryview(b"".join(frames))
    heads = np.cumsum([0, *map(len, frames)])[:-1].tolist()
    assert frame.scan(data) == (heads, None)
    found = [frame.next_head(data, 0)]
    while found[-1] is not None:
        found.append(frame.next_head(data, found[-1] + 4))
    assert found == [*heads, None]


@given(FILES, st.data())
def test_a_truncated_file_gives_whole_records_then_a_fault(payloads: list[bytes], draw: st.DataObject) -> None:
    frames = list(map(frame.encode, payloads))
    data = b"".join(frames)
    size = draw.draw(st.integers(0, len(data) - 1))
    ends = np.cumsum(list(map(len, frames))).tolist()
    whole = sum(end <= size for end in ends)
    start = ends[whole - 1] if whole else 0
    assert read_all(data[:size]) == (payloads[:whole], start)
    offsets, fault = frame.scan(memoryview(data[:size]))
    assert len(offsets) == whole
    assert (fault is None) == (start == size)
    assert fault is None or fault.offset == start


@given(FILES, st.data())
def test_a_changed_byte_does_not_affect_earlier_records(payloads: list[bytes], draw: st.DataObject) -> None:
    frames = list(map(frame.encode, payloads))
    data = bytearray(b"".join(frames))
    at = draw.draw(st.integers(0, len(data) - 1))
    data[at] ^= draw.draw(st.integers(1, 255))
    starts = np.cumsum([0, *map(len, frames)]).tolist()
    untouched = sum(start <= at for start in starts) - 1
    records, end = read_all(bytes(data))
    assert records[:untouched] == payloads[:untouched]
    assert end >= starts[untouched]
    if at - starts[untouched] < 4:  # in the magic word: always a fault, at exactly this record
        assert (len(records), end) == (untouched, starts[untouched])
    offsets, fault = frame.scan(memoryview(data))
    assert len(offsets) == len(records)
    assert (len(data) if fault is None else fault.offset) == end


@given(
    st.floats(width=32, allow_nan=False) | st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=20),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    PAYLOADS,
)
def test_headers_round_trip(label: float | list[float], key: int, key2: int, payload: bytes) -> None:
    record = pack(Header(label, key, key2), payload)
    header, image = unpack(record)
    assert (header.id, header.id2, bytes(image)) == (key, key2, payload)
    assert header.labels.tolist() == np.atleast_1d(np.asarray(label, np.float32)).tolist()
    assert pack(header, image) == record
