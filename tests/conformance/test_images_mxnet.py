"""Compares resized crops with MXNet 1.9.1's image functions and its ImageRecordIter, on the same boxes.

Needs MXNet's Python: .peers/mxnet, or the one that ECHELON_MXNET_PYTHON names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from echelon.data.images.augment import Augmenter, sample
from echelon.data.images.config import AugmentConfig
from echelon.data.images.decode import Region
from echelon.data.images.geometry import Geometry
from echelon.data.records import Header, Writer, pack
from mxnet_peer import run_mxnet

pytestmark = pytest.mark.peer

HEIGHT, WIDTH = 300, 400
SIZE = (112, 96)
# MXNet does not antialias, which explains up to 1.7 of 255 on this picture, and 0.25 where it is enlarged. Rounded to
# whole source pixels, the same crops would differ by 2.6 to 6.9.
MEAN_DIFFERENCE = 1.8


def detailed_picture() -> NDArray[np.uint8]:
    """Return an image with details of a few pixels, which half a pixel more or less changes."""
    coarse = np.random.default_rng(1).integers(0, 255, (HEIGHT // 5, WIDTH // 5, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC))


def mxnet(cases: list[dict[str, Any]]) -> list[NDArray[Any]]:
    run_mxnet("images_mxnet_side.py", cases)
    return [np.load(case["result"]).astype(float) for case in cases]


def test_boxes_of_resized_images_match_mxnet(tmp_path: Path) -> None:
    picture = detailed_picture()
    np.save(tmp_path / "image.npy", picture)
    boxes = [(x, y, *SIZE) for x, y in ((0, 0), (13, 57), (101, 3), (88, 91))] + [(20, 30, 170, 150), (7, 5, 131, 99)]
    cases: list[dict[str, Any]] = [
        {
            "image": str(tmp_path / "image.npy"),
            "resize": shorter,
            "box": box,
            "size": SIZE,
            "result": str(tmp_path / f"{shorter} {number}.npy"),
        }
        for shorter in (HEIGHT, 256, 287, 350)
        for number, box in enumerate(boxes)
    ]
    for case, theirs in zip(cases, mxnet(cases), strict=True):
        x, y, width, height = case["box"]
        wide, high = WIDTH / (WIDTH * case["resize"] // HEIGHT), HEIGHT / case["resize"]
        geometry = Geometry((x * wide, y * high, (x + width) * wide, (y + height) * high))
        ours = sample(Region(picture), geometry, SIZE[::-1], 0)
        assert np.abs(ours - theirs).mean() < MEAN_DIFFERENCE, case


@pytest.mark.parametrize("shorter", [256, 287, 350])
def test_centre_crops_match_image_record_iter(tmp_path: Path, shorter: int) -> None:
    picture = detailed_picture()
    records = tmp_path / "one.rec"
    Image.fromarray(picture).save(tmp_path / "one.png")
    with Writer(records) as writer:
        writer.write(pack(Header(0.0, 0), (tmp_path / "one.png").read_bytes()))
    case: dict[str, Any] = {
        "records": str(records),
        "resize": shorter,
        "size": SIZE,
        "result": str(tmp_path / "found.npy"),
    }
    config = AugmentConfig((3, *SIZE[::-1]), resize=shorter)
    ours = Augmenter(config).augment(picture, [0.5] * 80)
    (theirs,) = mxnet([case])
    assert np.abs(ours - theirs).mean() < MEAN_DIFFERENCE
