"""Making the samples of a chunk: read, decode and augment each, into its place in a batch's memory.

This and all that it imports does without torch, unless images are resized or recoloured: the loader's processes start
in a tenth of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from echelon.data.images.augment import Augmenter, Normaliser
from echelon.data.images.config import AugmentConfig
from echelon.data.images.geometry import Draws
from echelon.data.loading.sources import Source, class_number
from echelon.errors import DataError


@dataclass(frozen=True, slots=True)
class Recipe:
    """How samples are made. `fast`: with shortcuts (see `decode`); `normalise`: to floats, else they stay bytes."""

    source: Source
    augment: AugmentConfig
    fast: bool
    normalise: bool

    @property
    def needs_torch(self) -> bool:
        """Whether images will be resized or recoloured; a small one may need it otherwise, too."""
        config = self.augment
        resizes = config.resize > 0 or config.random_resized_crop or config.max_crop_size > 0
        return resizes or config.warps or config.changes_colour


class Bad(NamedTuple):
    """A sample that cannot be made, and why."""

    reason: str


Made: TypeAlias = int | NDArray[np.float32] | Bad
"""A sample's label, or labels; its pixels are in their place."""


class Maker:
    """Makes samples one after another. Each thread needs its own."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._augmenter = Augmenter(recipe.augment, recipe.fast)
        self._normaliser = Normaliser(recipe.augment)

    def make(self, records: Sequence[int], draws: Sequence[Draws], images: NDArray[Any]) -> list[Made]:
        """Make the samples of some records, the first of them in images[0]."""
        return [self._try(*one) for one in zip(records, draws, images, strict=True)]

    def _try(self, number: int, draws: Draws, out: NDArray[Any]) -> Made:
        try:
            return self._make(number, draws, out)
        except DataError as error:
            return Bad(str(error))

    def _make(self, number: int, draws: Draws, out: NDArray[Any]) -> int | NDArray[np.float32]:
        source = self._recipe.source
        sample = source.read(number)
        try:
            pixels = self._augmenter.augment(sample.payload, draws)
            label = class_number(sample.label) if isinstance(sample.label, float) else sample.label
        except DataError as error:
            raise DataError(f"{source.where(number)}: {error}") from error
        if self._recipe.normalise:
            self._normaliser.into(out, pixels)
        else:
            np.copyto(out, pixels)
        return label
