"""Encoded bytes to uint8 pixels (height, width, channels): JPEG by libjpeg-turbo, everything else by Pillow.

Decoding is most of the pipeline's time, so a JPEG is decoded no further than the crop needs. In numbers, for 480x360 at
quality 95 on one core, where a whole decode takes 0.64 ms and reading its Huffman codes alone 0.48:

- at 1/2, 1/4 or 1/8 of its size, inside the DCT, when the crop will be shrunk by that much anyway; the larger the
  photograph, the more it saves;
- where the file has restart markers, as `echelon data im2rec` writes them, only the segments around the crop: 0.3 ms
  for a random 224 crop (see `jpeg_cut`);
- elsewhere, with `fast`, only down to the crop's last row: the height in the frame header is lowered to it, and the
  decoder stops there. A random 224 crop needs 83 % of the rows (0.54 ms);
- with `fast`, chroma is upsampled by repetition instead of interpolation: 5 % less time for a mean difference of 1.3 of
  255.

Without `fast` the pixels asked for are those of a whole decode, bit for bit. Wrong bits in what is not decoded are not
seen; a file that breaks off always is. Bytes too many are no error, as for other decoders. Orientation tags are not
applied, as in MXNet.
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
from echelon.errors import DataError

Bytes: TypeAlias = bytes | bytearray | memoryview
Pixels: TypeAlias = NDArray[np.uint8]

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_JPEG_COLOURS = {1: "GRAY", 3: "RGB"}
_BASELINE = (0xC0, 0xC1)
_END = b"\xff\xd9"
_TOO_MANY = "extraneous bytes before marker"
_RESTART = " 0xd[0-7]"


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """What the first bytes say. `frame` is the offset of a baseline JPEG's frame header, where its height is."""

    height: int
    width: int
    is_jpeg: bool
    frame: int | None = None


class Region(NamedTuple):
    """Pixels at 1/shrink of their size. The first of them is (left, top) of the whole image at that size."""

    pixels: Pixels
    shrink: int = 1
    left: int = 0
    top: int = 0


class Decoder:
    """Decodes images one after another into one scratch buffer: what it returns is good until the next call.

    Each thread needs its own. The buffer saves a fresh half megabyte of zeroed pages an image.
    """

    def __init__(self, channels: int = 3, fast: bool = False) -> None:
        self._channels = channels
        self._fast = fast
        self._scratch = np.empty(0, np.uint8)

    def decode(self, payload: Bytes, info: ImageInfo, shrink: int = 1) -> Pixels:
        """Return the image at 1/shrink of its size, or whole if it cannot be decoded at that scale."""
        if not self._knows(info):
            return self._decode_other(payload)
        return self._decode_jpeg(payload, info.height, info.width, shrink)

    def decode_region(self, payload: Bytes, info: ImageInfo, shrink: int, box: Box) -> Region:
        """Return at least what the image has inside the box (of unshrunk pixels), at 1/shrink if that can be."""
        if not self._knows(info):
            return Region(self._decode_other(payload))
        if info.frame is None:
            return Region(self._decode_jpeg(payload, info.height, info.width, shrink), shrink)
        # Interpolated chroma looks at its neighbours, but no further than a MCU unless it is shrunk as well.
        smaller = cut(payload, box, 0 if self._fast else 1) if self._fast or shrink == 1 else None
        if smaller is not None:
            pixels = self._decode_jpeg(smaller.payload, smaller.height, smaller.width, shrink)
            return Region(pixels, shrink, smaller.left // shrink, smaller.top // shrink)
        rows = max(1, box[3])
        if self._fast and rows < info.height:
            shorter = _lower(payload, info.frame, rows)
            return Region(self._decode_jpeg(shorter, rows, info.width, shrink, is_lowered=True), shrink)
        return Region(self._decode_jpeg(payload, info.height, info.width, shrink), shrink)

    def _knows(self, info: ImageInfo) -> bool:
        return info.is_jpeg and self._channels in _JPEG_COLOURS

    def _decode_jpeg(self, payload: Bytes, height: int, width: int, shrink: int, is_lowered: bool = False) -> Pixels:
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
            if not _is_harmless(str(error), is_lowered):
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
    """Return an image of 16 bits with its upper ones, where Pillow's own conversion makes nearly all of it white."""
    if not image.mode.startswith("I"):
        return image
    return Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))


def inspect(payload: Bytes) -> ImageInfo:
    """Return an encoded image's size without decoding it."""
    if bytes(payload[:2]) != b"\xff\xd8":
        with _opened(payload) as image:
            return ImageInfo(image.height, image.width, False)
    try:
        return _inspect_jpeg(payload)
    except (IndexError, ValueError) as error:
        raise DataError(f"cannot read the JPEG's header: {error}") from None


def _inspect_jpeg(payload: Bytes) -> ImageInfo:
    """Walk the segments up to the frame header; reads a few dozen bytes."""
    for marker, at in segments(payload):
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = (int.from_bytes(payload[at + k : at + k + 2], "big") for k in (5, 7))
            if not (height and width):
                raise ValueError(f"its size is {width}x{height}")
            return ImageInfo(height, width, True, at if marker in _BASELINE else None)
    raise ValueError("its pixels begin before its size is known")


def _is_harmless(said: str, is_lowered: bool) -> bool:
    """Tell bytes too many after the last pixel from those before a restart marker, where they mean wrong bits."""
    return _TOO_MANY in said and (is_lowered or re.search(_RESTART, said) is None)


def _lower(payload: Bytes, frame: int, num_rows: int) -> bytearray:
    """Return the JPEG as if it had only its first rows."""
    shorter = bytearray(payload)
    shorter[frame + 5 : frame + 7] = num_rows.to_bytes(2, "big")
    if shorter.rfind(_END, frame) < 0:  # the decoder says so only where there are no restart markers
        raise DataError("cannot decode the JPEG: Premature end of JPEG file")
    return shorter


def _opened(payload: Bytes) -> Image.Image:
    try:
        return Image.open(io.BytesIO(payload))
    except UnidentifiedImageError:
        start = bytes(payload[:8]).hex(" ")
        raise DataError(f"{len(payload)} bytes that begin with {start} are no image known here") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise DataError(f"cannot open the image: {error}") from None
