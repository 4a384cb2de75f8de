"""Decodes images to uint8 pixels (height, width, channels): JPEG with libjpeg-turbo, other formats with Pillow.

Decoding takes most of a loader's time, so only what the crop needs of a JPEG is decoded. The numbers are for 480x360 at
quality 95 on one core, where a full decode takes 0.64 ms and reading its Huffman codes alone takes 0.48 ms:

- If the crop will be shrunk to 1/2, 1/4 or 1/8 anyway, the DCT decodes at that size. The larger the photograph, the
  more time this saves.
- If the file has restart markers, as `echelon data im2rec` writes them, only the segments around the crop are decoded:
  0.3 ms for a random 224 crop (see `jpeg_cut`).
- Otherwise, with `fast`, decoding ends at the crop's last row, because the height in the frame header is reduced to it.
  A random 224 crop needs 83 % of the rows (0.54 ms).
- With `fast`, chroma is upsampled by repetition instead of interpolation: 5 % less time, and a mean difference of 1.3
  of 255.

Without `fast`, the requested pixels are bit for bit those of a full decode. Corrupt data in a part that is not decoded
is not detected; a truncated file always is. Extra bytes are not an error, as for other decoders. Orientation tags are
not applied, as in MXNet.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from echelon.data.images.jpeg_cut import Box, cut, segments
from echelon.data.records.frame import Bytes
from echelon.errors import DataError

Pixels: TypeAlias = NDArray[np.uint8]

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_JPEG_COLOURS = {1: "GRAY", 3: "RGB"}
_BASELINE = (0xC0, 0xC1)
_END = b"\xff\xd9"
_EXTRA_BYTES = "extraneous bytes before marker"
_RESTART = " 0xd[0-7]"


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """What an image's header states. `frame` is the offset of a baseline JPEG's frame header, which has its height."""

    height: int
    width: int
    is_jpeg: bool
    frame: int | None = None


class Region(NamedTuple):
    """Part of an image at 1/shrink of its size. The first pixel is at (left, top) of the whole image at that size."""

    pixels: Pixels
    shrink: int = 1
    left: int = 0
    top: int = 0


class Decoder:
    """Decodes images one after another into one scratch buffer; a result is valid until the next call.

    Each thread needs its own. The buffer saves allocating and zeroing half a megabyte per image.
    """

    def __init__(self, channels: int = 3, fast: bool = False) -> None:
        self._channels = channels
        self._fast = fast
        self._scratch = np.empty(0, np.uint8)

    def decode(self, payload: Bytes, info: ImageInfo, shrink: int = 1) -> Pixels:
        """Return the image at 1/shrink of its size, or at full size if it is not a JPEG."""
        if not self._is_turbo_jpeg(info):
            return self._decode_other(payload)
        return self._decode_jpeg(payload, info.height, info.width, shrink)

    def decode_region(self, payload: Bytes, info: ImageInfo, shrink: int, box: Box) -> Region:
        """Return at least the part of the image inside the box (in full-size pixels), at 1/shrink if it is a JPEG."""
        if not self._is_turbo_jpeg(info):
            return Region(self._decode_other(payload))
        if info.frame is None:
            return Region(self._decode_jpeg(payload, info.height, info.width, shrink), shrink)
        # Interpolated chroma depends on its neighbours, but at most one MCU away, unless it is shrunk as well.
        smaller = cut(payload, box, 0 if self._fast else 1) if self._fast or shrink == 1 else None
        if smaller is not None:
            pixels = self._decode_jpeg(smaller.payload, smaller.height, smaller.width, shrink)
            return Region(pixels, shrink, smaller.left // shrink, smaller.top // shrink)
        rows = max(1, box[3])
        if self._fast and rows < info.height:
            shorter = _shorten(payload, info.frame, rows)
            return Region(self._decode_jpeg(shorter, rows, info.width, shrink, is_shortened=True), shrink)
        return Region(self._decode_jpeg(payload, info.height, info.width, shrink), shrink)

    def _is_turbo_jpeg(self, info: ImageInfo) -> bool:
        return info.is_jpeg and self._channels in _JPEG_COLOURS

    def _decode_jpeg(self, payload: Bytes, height: int, width: int, shrink: int, is_shortened: bool = False) -> Pixels:
        height, width = -(-height // shrink), -(-width // shrink)
        num_bytes = height * width * self._channels
        if len(self._scratch) < num_bytes:
            self._scratch = np.empty(num_bytes, np.uint8)
        try:
            simplejpeg.decode_jpeg(
                payload,
                _JPEG_COLOURS[self._channels],
                fastupsample=self._fast,
                min_height=height,
                min_width=width,
                buffer=self._scratch,
            )
        except ValueError as error:
            if not _is_harmless(str(error), is_shortened):
                raise DataError(f"cannot decode the JPEG: {error}") from None
        return self._scratch[:num_bytes].reshape(height, width, self._channels)

    def _decode_other(self, payload: Bytes) -> Pixels:
        with _opened(payload) as image:
            try:
                plain = in_eight_bits(image).convert(_MODES[self._channels])
                return np.asarray(plain).reshape(image.height, image.width, -1)
            except (OSError, ValueError, SyntaxError) as error:
                raise DataError(f"cannot decode the {image.format} image: {error}") from None


def in_eight_bits(image: Image.Image) -> Image.Image:
    """Return the upper 8 bits of a 16-bit image, because Pillow's own conversion makes it nearly all white."""
    if not image.mode.startswith("I"):
        return image
    return Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))


def inspect(payload: Bytes) -> ImageInfo:
    """Return the size of an encoded image without decoding it."""
    if bytes(payload[:2]) != b"\xff\xd8":
        with _opened(payload) as image:
            return ImageInfo(image.height, image.width, False)
    try:
        return _inspect_jpeg(payload)
    except (IndexError, ValueError) as error:
        raise DataError(f"cannot read the JPEG's header: {error}") from None


def _inspect_jpeg(payload: Bytes) -> ImageInfo:
    """Read the segments up to the frame header, a few dozen bytes."""
    for marker, at in segments(payload):
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = (int.from_bytes(payload[at + k : at + k + 2], "big") for k in (5, 7))
            if not (height and width):
                raise ValueError(f"its size is {width}x{height}")
            return ImageInfo(height, width, True, at if marker in _BASELINE else None)
    raise ValueError("it has pixels but no frame header with its size")


def _is_harmless(message: str, is_shortened: bool) -> bool:
    """Whether an error is about extra bytes after the last pixel; before a restart marker they mean corrupt data."""
    return _EXTRA_BYTES in message and (is_shortened or re.search(_RESTART, message) is None)


def _shorten(payload: Bytes, frame: int, num_rows: int) -> bytearray:
    """Return the JPEG with the height in its frame header reduced to `num_rows`."""
    shorter = bytearray(payload)
    shorter[frame + 5 : frame + 7] = num_rows.to_bytes(2, "big")
    if shorter.rfind(_END, frame) < 0:  # the decoder reports it only if there are no restart markers
        raise DataError("cannot decode the JPEG: Premature end of JPEG file")
    return shorter


def _opened(payload: Bytes) -> Image.Image:
    try:
        return Image.open(io.BytesIO(payload))
    except UnidentifiedImageError:
        if not len(payload):
            raise DataError("it is empty, not an image") from None
        start = bytes(payload[:8]).hex(" ")
        raise DataError(f"{len(payload)} bytes that begin with {start} are not an image in a known format") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise DataError(f"cannot open the image: {error}") from None
