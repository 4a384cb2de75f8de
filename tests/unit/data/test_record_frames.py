"""The bytes of RecordIO: golden frames and headers, and the error for each kind of damage."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from echelon.data.records import Header, Reader, RecordError, Writer, frame, pack, unpack
from echelon.data.records.file import RecordFile
from echelon.errors import DataError, UsageError

MAGIC = bytes.fromhex("0a23d7ce")
GOLDEN = [
    (b"", "0a23d7ce 00000000"),
    (b"abc", "0a23d7ce 03000000 61626300"),
    (b"0123" + MAGIC + b"45", "0a23d7ce 04000020 30313233 0a23d7ce 02000060 34350000"),
    (MAGIC + b"abcd", "0a23d7ce 00000020 0a23d7ce 04000060 61626364"),
    (MAGIC + MAGIC, "0a23d7ce 00000020 0a23d7ce 00000040 0a23d7ce 00000060"),
    (b"x" + MAGIC + b"yz", "0a23d7ce 07000000 780a23d7 ce797a00"),
]


@pytest.mark.parametrize(("payload", "encoded"), GOLDEN)
def test_golden_frames(payload: bytes, encoded: str) -> None:
    expected = bytes.fromhex(encoded)
    assert frame.encode(payload) == expected
    decoded, after = frame.decode(memoryview(expected), 0)
    assert (bytes(decoded), after) == (payload, len(expected))


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (Header(3, 7), "00000000 00004040 0700000000000000 0000000000000000"),
        (Header([1, 2], 7), "02000000 00000000 0700000000000000 0000000000000000 0000803f 00000040"),
    ],
)
def test_golden_headers(header: Header, expected: str) -> None:
    record = pack(header, b"image")
    assert record == bytes.fromhex(expected) + b"image"
    back, payload = unpack(record)
    assert (back.labels.tolist(), back.id, back.id2, bytes(payload)) == (header.labels.tolist(), 7, 0, b"image")


def test_one_label_in_a_list_stays_a_list() -> None:
    assert np.ndim(unpack(pack(Header(5.0, 1), b""))[0].label) == 0
    assert np.ndim(unpack(pack(Header([5.0], 1), b""))[0].label) == 1


@pytest.mark.parametrize("header", [Header([], 0), Header(np.ones((1, 1)), 0), Header(1, -1), Header(1, 2**64)])
def test_invalid_headers_are_errors(header: Header) -> None:
    with pytest.raises(UsageError):
        pack(header, b"")


@pytest.mark.parametrize("record", [b"", bytes(23), struct.pack("<IfQQ", 2, 0, 0, 0) + bytes(7)])
def test_records_too_short_for_their_header(record: bytes) -> None:
    with pytest.raises(DataError, match=f"{len(record)}"):
        unpack(record)


def test_record_longer_than_the_format_allows() -> None:
    with pytest.raises(UsageError, match=r"536870912 bytes is too long.*536870911"):
        frame.encode(bytes(2**29))


def test_eight_byte_payloads_are_sixteen_bytes_apart(tmp_path: Path) -> None:
    with Writer(tmp_path / "a.rec") as writer:
        assert [writer.write(b"8 bytes!") for _ in range(4)] == [0, 16, 32, 48]
    assert RecordFile(tmp_path / "a.rec").scan().tolist() == [0, 16, 32, 48]


def _set_kind(kind: int) -> Callable[[bytearray], None]:
    def damage(data: bytearray) -> None:
        data[23] = kind << 5

    return damage


def _cut_to(size: int) -> Callable[[bytearray], None]:
    def damage(data: bytearray) -> None:
        del data[size:]

    return damage


def _flip_magic(data: bytearray) -> None:
    data[16] ^= 1


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_cut_to(18), "ends after 2 of the 8 head bytes"),
        (_cut_to(26), "states 8 bytes, but the file has only 2 more"),
        (_flip_magic, "expected the magic word 0a 23 d7 ce, found 0b 23 d7 ce"),
        (_set_kind(2), r"middle part \(flag 2\)"),
        (_set_kind(3), r"last part \(flag 3\)"),
        (_set_kind(6), r"unknown kind \(flag 6\)"),
        (_set_kind(1), r"whole record \(flag 0\) begins here.*part at byte 32"),
    ],
)
def test_damage_in_the_second_of_three_records(
    tmp_path: Path, damage: Callable[[bytearray], None], reason: str
) -> None:
    data = bytearray(frame.encode(b"8 bytes!") * 3)
    damage(data)
    path = tmp_path / "bad.rec"
    path.write_bytes(data)
    with (
        pytest.raises(RecordError, match=f"bad.rec: record 1 at byte 16: .*{reason}") as caught,
        Reader(path) as reader,
    ):
        list(reader)
    assert (caught.value.path, caught.value.offset, caught.value.record) == (path, 16, 1)
    with pytest.raises(RecordError) as scanned:
        RecordFile(path).scan()
    assert str(scanned.value) == str(caught.value)


def test_a_length_that_covers_the_next_record_is_detected_when_skipping(tmp_path: Path) -> None:
    data = bytearray(frame.encode(b"8 bytes!") * 3)
    data[4] = 24
    path = tmp_path / "long.rec"
    path.write_bytes(data)
    with Reader(path) as reader:
        assert len(list(reader)) == 2
    bad: list[RecordError] = []
    with Reader(path, bad.append) as reader:
        assert len(list(reader)) == 2
    assert [(fault.offset, fault.record) for fault in bad] == [(0, 0)]
    assert "record head at byte 16" in str(bad[0])


def test_bad_records_are_passed_to_on_bad_and_the_rest_is_read(tmp_path: Path) -> None:
    payloads = [b"one", b"four" + MAGIC + b"four", b"three", b"last"]
    frames = [frame.encode(payload) for payload in payloads]
    data = bytearray(b"".join(frames))
    second = len(frames[0])
    data[second] ^= 1
    path = tmp_path / "bad.rec"
    path.write_bytes(data)
    bad: list[RecordError] = []
    with Reader(path, bad.append) as reader:
        assert [bytes(payload) for payload in reader] == [b"one", b"three", b"last"]
    assert [(fault.offset, fault.record) for fault in bad] == [(second, 1)]
