"""Cut JPEGs have the pixels of the whole image, for any image, chroma subsampling, restart interval and box."""

from __future__ import annotations

import io

import numpy as np
import pytest
import simplejpeg
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from echelon.data.images.decode import Decoder, inspect
from echelon.data.images.jpeg_cut import cut, segments

SIDES = {"4:4:4": (8, 8), "4:2:2": (16, 8), "4:2:0": (16, 16), "grey": (8, 8)}


@st.composite
def jpegs(draw: st.DrawFn) -> tuple[bytes, int, int]:
    """Noise, which shows every difference in decoding, with restart intervals that divide a row of MCUs."""
    colours = draw(st.sampled_from(sorted(SIDES)))
    width, height = draw(st.integers(1, 150)), draw(st.integers(1, 150))
    across = -(-width // SIDES[colours][0])
    interval = draw(st.sampled_from([one for one in range(1, across + 1) if across % one == 0]))
    noise = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 256, (height, width, 3), np.uint8)
    image = Image.fromarray(noise).convert("L" if colours == "grey" else "RGB")
    stream = io.BytesIO()
    options: dict[str, object] = {} if colours == "grey" else {"subsampling": colours}
    quality = draw(st.integers(1, 100))
    image.save(stream, "JPEG", quality=quality, restart_marker_blocks=interval, **options)
    return stream.getvalue(), width, height


@st.composite
def boxes(draw: st.DrawFn, width: int, height: int) -> tuple[int, int, int, int]:
    """A box that overlaps the image. It may extend beyond it, or end at an MCU, where neighbours matter most."""

    def edge(low: int, high: int) -> int:
        number = draw(st.integers(low, high))
        return max(low, number // 16 * 16) if draw(st.booleans()) else number

    left, top = edge(-30, width - 1), edge(-30, height - 1)
    return left, top, edge(max(left, 0) + 1, width + 30), edge(max(top, 0) + 1, height + 30)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("channels", [1, 3])
@given(data=st.data())
def test_the_pixels_in_the_box_are_those_of_the_whole_image(fast: bool, channels: int, data: st.DataObject) -> None:
    payload, width, height = data.draw(jpegs())
    box = data.draw(boxes(width, height))
    part = Decoder(channels, fast).decode_region(payload, inspect(payload), 1, box)
    whole = simplejpeg.decode_jpeg(payload, "GRAY" if channels == 1 else "RGB", fastupsample=fast)
    left, top, right, bottom = max(box[0], 0), max(box[1], 0), min(box[2], width), min(box[3], height)
    inside = part.pixels[top - part.top : bottom - part.top, left - part.left : right - part.left]
    assert np.array_equal(inside, whole[top:bottom, left:right])


@given(data=st.data())
def test_shrunk_pixels_are_those_of_the_whole_image(data: st.DataObject) -> None:
    payload, width, height = data.draw(jpegs())
    box, shrink = data.draw(boxes(width, height)), data.draw(st.sampled_from([2, 4, 8]))
    decoder = Decoder(fast=True)
    whole = decoder.decode(payload, inspect(payload), shrink).copy()
    part = decoder.decode_region(payload, inspect(payload), shrink, box)
    left, top, right, bottom = (max(edge, 0) // shrink for edge in box)
    right, bottom = min(right, width // shrink), min(bottom, height // shrink)
    inside = part.pixels[top - part.top : bottom - part.top, left - part.left : right - part.left]
    assert np.array_equal(inside, whole[top:bottom, left:right])


@given(data=st.data())
def test_a_cut_contains_the_box_and_only_whole_segments_around_it(data: st.DataObject) -> None:
    payload, width, height = data.draw(jpegs())
    box = data.draw(boxes(width, height))
    smaller = cut(payload, box)
    if smaller is None:
        return
    decoded = Image.open(io.BytesIO(smaller.payload))
    decoded.load()
    assert decoded.size == (smaller.width, smaller.height)
    assert smaller.left <= max(box[0], 0) < min(box[2], width) <= smaller.left + smaller.width
    assert smaller.top <= max(box[1], 0) < min(box[3], height) <= smaller.top + smaller.height
    assert smaller.width * smaller.height < width * height
    assert len(smaller.payload) < len(payload)


@given(data=st.data())
def test_damaged_files_never_raise(data: st.DataObject) -> None:
    payload = bytearray(data.draw(jpegs())[0])
    heads = [at for marker, at in segments(payload) if marker in (0xC0, 0xDA, 0xDD)]
    spots = [at + k for at in heads for k in range(19) if at + k < len(payload)]
    for _ in range(data.draw(st.integers(0, 3))):
        payload[data.draw(st.sampled_from(spots))] = data.draw(st.sampled_from([0, 1, 4, 0x22, 0xC0, 0xDA, 0xFF]))
    end = data.draw(st.none() | st.integers(0, len(payload)))
    smaller = cut(bytes(payload[:end]), (10, 10, 40, 40))
    assert smaller is None or len(smaller.payload) <= len(payload)
