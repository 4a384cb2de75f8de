"""Runs under MXNet's Python: crops images as each case says, and writes the pixels to files."""

from __future__ import annotations

import json
import sys
from typing import Any

import mxnet as mx
import numpy as np


def cropped(case: dict[str, Any]) -> Any:
    """Return the pixels of one case: a box of an image, or the first batch of an ImageRecordIter."""
    if "box" in case:
        image = mx.image.resize_short(mx.nd.array(np.load(case["image"]), dtype="uint8"), case["resize"], interp=1)
        return mx.image.fixed_crop(image, *case["box"], tuple(case["size"]), interp=1).asnumpy()
    width, height = case["size"]
    shape = (3, height, width)
    batches = mx.io.ImageRecordIter(path_imgrec=case["records"], data_shape=shape, batch_size=1, resize=case["resize"])
    return batches.next().data[0].asnumpy()[0].transpose(1, 2, 0)


for case in json.load(sys.stdin):
    np.save(case["result"], cropped(case))
