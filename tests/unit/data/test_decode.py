"""Decoding: correct pixels from every format, only the requested region, and errors that say what is wrong."""

from __future__ import annotations

import io

import numpy as np
import pytest
import simplejpeg
from PIL import Image
from sample_images import encoded, jpeg, picture

from echelon.data.images.decode import Decoder, ImageInfo, inspect
from echelon.errors import DataError

PICTURE = picture(1, 70, 90)


def rows(stop: int) -> tuple[int, int, int, int]:
    """Return the box of the first rows."""
    return 0, 0, 90, stop


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (jpeg(PICTURE), ImageInfo(70, 90, True, 158)),
        (encoded(PICTURE, "JPEG", progressive=True), ImageInfo(70, 90, True)),
        (encoded(PICTURE, "PNG"), ImageInfo(70, 90, False)),
        (encoded(PICTURE, "WEBP"), ImageInfo(70, 90, False)),
    ],
)
def test_the_size_is_known_before_decoding(payload: bytes, expected: ImageInfo) -> None:
    assert inspect(memoryview(payload)) == expected


def test_an_exact_jpeg_has_the_pixels_of_the_library() -> None:
    payload = jpeg(PICTURE)
    part = Decoder().decode_region(memoryview(payload), inspect(payload), 1, rows(5))
    assert np.array_equal(part.pixels, simplejpeg.decode_jpeg(payload))


@pytest.mark.parametrize("num_rows", [1, 17, 32, 69, 70, 300])
@pytest.mark.parametrize("restarts", [0, 1])
def test_a_fast_jpeg_has_the_requested_rows(num_rows: int, restarts: int) -> None:
    payload = encoded(PICTURE, "JPEG", quality=95, restart_marker_rows=restarts)
    whole = simplejpeg.decode_jpeg(payload, fastupsample=True)
    part = Decoder(fast=True).decode_region(payload, inspect(payload), 1, rows(num_rows))
    assert part.pixels.shape[0] == min(num_rows, 70)
    assert np.array_equal(part.pixels, whole[:num_rows])


def test_a_progressive_jpeg_is_never_cut() -> None:
    payload = encoded(PICTURE, "JPEG", progressive=True)
    part = Decoder(fast=True).decode_region(payload, inspect(payload), 1, rows(10))
    assert part.pixels.shape == (70, 90, 3)


@pytest.mark.parametrize("shrink", [2, 4, 8])
@pytest.mark.parametrize("fast", [False, True])
def test_a_jpeg_is_decoded_at_a_fraction_of_its_size(shrink: int, fast: bool) -> None:
    payload = jpeg(picture(1, 72, 96))
    pixels = Decoder(fast=fast).decode(payload, inspect(payload), shrink)
    whole = simplejpeg.decode_jpeg(payload).astype(float)
    means = whole.reshape(72 // shrink, shrink, 96 // shrink, shrink, 3).mean((1, 3))
    assert pixels.shape == means.shape
    assert np.abs(pixels - means).mean() < 4


@pytest.mark.parametrize(("shrink", "shape"), [(2, (35, 45, 3)), (4, (18, 23, 3)), (8, (9, 12, 3))])
def test_shrunk_sizes_are_rounded_up(shrink: int, shape: tuple[int, ...]) -> None:
    payload = jpeg(PICTURE)
    assert Decoder().decode(payload, inspect(payload), shrink).shape == shape


@pytest.mark.parametrize("channels", [1, 3])
def test_sixteen_bit_images_keep_their_upper_bits(channels: int) -> None:
    grey = (np.arange(64 * 64, dtype=np.uint16) * 16).reshape(64, 64)
    stream = io.BytesIO()
    Image.fromarray(grey).save(stream, "PNG")
    pixels = Decoder(channels).decode(stream.getvalue(), inspect(stream.getvalue()))
    assert np.array_equal(pixels, np.repeat((grey >> 8)[..., None], channels, axis=2))


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_lossless_formats_are_decoded_exactly(kind: str) -> None:
    payload = encoded(PICTURE, kind, lossless=True)
    part = Decoder().decode_region(payload, inspect(payload), 2, rows(10))
    assert part.shrink == 1
    assert np.array_equal(part.pixels, PICTURE)


def test_grey_colour_palette_and_cmyk() -> None:
    grey = np.asarray(Image.fromarray(PICTURE).convert("L"))
    for kind in ("PNG", "JPEG"):
        payload = encoded(grey, kind)
        assert Decoder(1).decode(payload, inspect(payload)).shape == (70, 90, 1)
        assert Decoder(3).decode(payload, inspect(payload)).shape == (70, 90, 3)
    payload = jpeg(PICTURE)
    assert np.abs(Decoder(1).decode(payload, inspect(payload))[..., 0].astype(int) - grey).mean() < 3
    assert Decoder(4).decode(payload, inspect(payload)).shape == (70, 90, 4)
    for mode, kind in (("P", "PNG"), ("CMYK", "JPEG")):
        payload = encoded(Image.fromarray(PICTURE).convert(mode), kind)
        pixels = Decoder(3).decode(payload, inspect(payload))
        assert np.abs(pixels.astype(int) - PICTURE).mean() < 20


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"", "it is empty, not an image"),
        (b"no image at all", "6e 6f 20 69"),
        (b"\xff\xd8\xff", "header"),
        (b"\xff\xd8\x00\x00\x00\x00", "byte 2, found 0x00"),
        (jpeg(PICTURE)[:30], "header"),
        (encoded(PICTURE, "PNG")[:20], "open"),
    ],
)
def test_bytes_that_are_not_an_image_are_an_error(payload: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        inspect(payload)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_truncated_image_is_an_error(kind: str) -> None:
    payload = encoded(PICTURE, kind)
    payload = payload[: len(payload) // 2]
    with pytest.raises(DataError, match=kind):
        Decoder().decode(payload, inspect(payload))


@pytest.mark.parametrize("num_rows", [80, 300])
def test_a_truncated_image_is_an_error_when_fast(num_rows: int) -> None:
    payload = jpeg(picture(2, 320, 240))
    cut = payload[: len(payload) // 2]
    with pytest.raises(DataError, match="Premature end"):
        Decoder(fast=True).decode_region(cut, inspect(cut), 1, (0, 0, 240, num_rows))


def test_extra_bytes_are_not_an_error() -> None:
    payload = jpeg(PICTURE)
    padded = payload[:-2] + b"some more" + payload[-2:]
    with pytest.raises(ValueError, match="extraneous"):
        simplejpeg.decode_jpeg(padded)
    assert np.array_equal(Decoder().decode(padded, inspect(padded)), simplejpeg.decode_jpeg(payload))
