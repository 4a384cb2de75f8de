"""Cutting JPEGs: which files are cut, which are not, and that damage is detected."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import simplejpeg
from numpy.typing import NDArray
from sample_images import encoded, jpeg

from echelon.data.images.decode import Decoder, inspect
from echelon.data.images.jpeg_cut import cut
from echelon.errors import DataError

NOISE: NDArray[np.uint8] = np.random.default_rng(0).integers(0, 256, (96, 160, 3), np.uint8)
MIDDLE = (64, 32, 96, 64)


def marked(interval: int, **options: object) -> bytes:
    return encoded(NOISE, "JPEG", quality=90, restart_marker_blocks=interval, **options)


@pytest.mark.parametrize(
    ("interval", "box", "expected"),
    [
        (1, (64, 32, 96, 64), (64, 32, 32, 32)),
        (1, (63, 31, 97, 65), (48, 16, 64, 64)),
        (2, (50, 40, 60, 50), (32, 32, 32, 32)),
        (5, (50, 40, 60, 50), (0, 32, 80, 32)),
        (10, (50, 40, 60, 50), (0, 32, 160, 32)),
        (1, (150, 90, 300, 300), (144, 80, 16, 16)),
        (1, (200, 200, 300, 300), (144, 80, 16, 16)),
        (1, (-9, -9, -5, -5), (0, 0, 16, 16)),
    ],
)
def test_whole_segments_around_the_box_are_kept(
    interval: int, box: tuple[int, int, int, int], expected: tuple[int, int, int, int]
) -> None:
    smaller = cut(memoryview(marked(interval)), box)
    assert smaller is not None
    assert (smaller.left, smaller.top, smaller.width, smaller.height) == expected


def test_the_margin_is_in_mcus() -> None:
    smaller = cut(marked(1), MIDDLE, margin=1)
    assert smaller is not None
    assert (smaller.left, smaller.top, smaller.width, smaller.height) == (48, 16, 64, 64)


def test_interpolated_chroma_needs_the_margin() -> None:
    payload = marked(1)
    whole = simplejpeg.decode_jpeg(payload)[32:64, 64:96]
    bare = cut(payload, MIDDLE)
    assert bare is not None
    assert not np.array_equal(simplejpeg.decode_jpeg(bare.payload), whole)
    part = Decoder().decode_region(payload, inspect(payload), 1, MIDDLE)
    assert np.array_equal(part.pixels[16:48, 16:48], whole)


def test_bytes_after_the_image_are_ignored() -> None:
    payload = marked(2)
    smaller = cut(payload, MIDDLE)
    assert smaller is not None
    assert cut(payload + b"more" + payload, MIDDLE) == smaller


def test_nothing_is_cut_if_that_saves_little() -> None:
    assert cut(marked(1), (0, 0, 160, 96)) is None
    assert cut(marked(1), (4, 4, 156, 92)) is None
    assert cut(marked(10), (0, 0, 20, 20)) is None  # the decoder stops below the box anyway


@pytest.mark.parametrize(
    "payload",
    [
        jpeg(NOISE),
        marked(3),  # ten MCUs per row
        marked(20),
        marked(2, progressive=True),
        marked(2)[:-2],
        marked(2)[:200],
        marked(2)[:-2000],
        marked(2).replace(b"\xff\xd3", b"\xff\xd4", 1),
        marked(2).replace(b"\xff\xd3", b"\x00\x00", 1),
    ],
    ids=["no markers", "odd interval", "rows", "progressive", "no end", "head", "half", "wrong turn", "missing"],
)
def test_unusual_files_are_not_cut(payload: bytes) -> None:
    assert cut(payload, MIDDLE) is None


def scans(payload: bytes) -> bytes:
    """Return the JPEG with a frame header that states more components than its scan has."""
    at = payload.index(b"\xff\xda")
    return payload[: at + 4] + b"\x01" + payload[at + 5 :]


def twelve_bits(payload: bytes) -> bytes:
    """Return the JPEG with a frame header of twelve bits."""
    at = payload.index(b"\xff\xc0")
    return payload[:at] + b"\xff\xc1\x00\x11\x0c" + payload[at + 5 :]


def no_blocks(payload: bytes) -> bytes:
    """Return the JPEG with a frame header whose components have no blocks."""
    changed = bytearray(payload)
    at = payload.index(b"\xff\xc0") + 11
    changed[at : at + 9 : 3] = bytes(3)
    return bytes(changed)


@pytest.mark.parametrize("change", [scans, twelve_bits, no_blocks])
def test_other_kinds_of_jpeg_are_not_cut(change: Callable[[bytes], bytes]) -> None:
    assert cut(change(marked(2)), MIDDLE) is None


@pytest.mark.parametrize("lost", [1, 2, 500, 5000])
def test_a_truncated_file_is_detected_even_if_the_box_is_complete(lost: int) -> None:
    payload = marked(2)[:-lost]
    with pytest.raises(DataError, match="Premature end"):
        Decoder(fast=True).decode_region(payload, inspect(payload), 1, MIDDLE)


@pytest.mark.parametrize("fill", [0x00, 0x55, 0xFE])
@pytest.mark.parametrize("fast", [True, False])
def test_damage_inside_the_box_is_detected(fill: int, fast: bool) -> None:
    payload = bytearray(marked(10))
    at = payload.index(b"\xff\xd1")
    payload[at + 2 : at + 400] = bytes([fill]) * 398
    with pytest.raises(DataError, match="Corrupt JPEG"):
        Decoder(fast=fast).decode_region(bytes(payload), inspect(payload), 1, (0, 32, 160, 64))
