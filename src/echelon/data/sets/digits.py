"""The handwritten-digits set that ships with the package, so that the demo and the tests need no download."""

from __future__ import annotations

from importlib.resources import files

import numpy as np
import torch
from torch import Tensor

NUM_VALIDATION = 360
_SPLIT_SEED = 1797  # The file is ordered by writer; one fixed shuffle gives both parts every writer.


def load_digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return ((train images, labels), (validation images, labels)); images are float32 1x8x8 of about zero mean."""
    with files("echelon.data").joinpath("assets/digits.npz").open("rb") as stream, np.load(stream) as archive:
        images = torch.from_numpy(archive["images"]).float().unsqueeze(1) / 8.0 - 0.6
        labels = torch.from_numpy(archive["labels"]).long()
    order = torch.from_numpy(np.random.default_rng(_SPLIT_SEED).permutation(len(labels)))
    images, labels = images[order], labels[order]
    return (images[NUM_VALIDATION:], labels[NUM_VALIDATION:]), (images[:NUM_VALIDATION], labels[:NUM_VALIDATION])
