"""Predictions of a checkpoint's network, in three lines:

    from echelon.train.predict import Predictor
    predict = Predictor.load("prefix-0012.safetensors")
    predict("photo.jpg")

Owns the way from a snapshot to a network in eval mode, and from an image to what the network got in validation: the
same shape, centre crop, mean and std, which the checkpoint has in its facts. A network named package.module:function
is imported, so load such checkpoints only from people you trust with that.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, TypeAlias, TypeVar, overload

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from echelon import models
from echelon.data.images.augment import Augmenter, Normaliser, num_lanes
from echelon.data.images.config import AugmentConfig
from echelon.errors import DataError, UsageError
from echelon.train.checkpoint.format import Snapshot, load
from echelon.train.step.average import averaged

Picture: TypeAlias = str | os.PathLike[str] | Image.Image | NDArray[np.uint8]
Ranking: TypeAlias = list[tuple[int, float]]

_Kind = TypeVar("_Kind")

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


class _Network(msgspec.Struct):
    network: str
    num_classes: int
    image_shape: tuple[int, int, int]
    num_layers: int | None = None
    network_options: dict[str, Any] = {}  # msgspec makes a new one each time


class _Preprocessing(msgspec.Struct):
    image_shape: tuple[int, int, int]
    rgb_mean: tuple[float, ...]
    rgb_std: tuple[float, ...]


class Predictor:
    """A network with the preprocessing it was validated with. Calls from several threads must take turns."""

    def __init__(self, model: nn.Module, preprocessing: AugmentConfig, device: torch.device | str = "cpu") -> None:
        self._device = _usable(device)
        self.model = model.to(self._device).eval()
        self.preprocessing = preprocessing
        self._augmenter = Augmenter(preprocessing, fast=False)
        self._normaliser = Normaliser(preprocessing)
        self._draws = [0.0] * num_lanes(preprocessing)  # nothing is random

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: torch.device | str = "cpu", *, resize: int = -1) -> Self:
        """The network of a checkpoint. With `resize`, a picture's shorter edge is first made that long.

        Validation crops without resizing, as it gets images of a fitting size; photographs need a `resize`.
        """
        snapshot = load(path)
        return cls(model_of(snapshot, path), preprocessing_of(snapshot, path, resize), device)

    @overload  # a path is a sequence of strings too, which the first signature catches
    def __call__(self, images: Picture, top_k: int = 5) -> Ranking: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, images: Sequence[Picture] | Tensor, top_k: int = 5) -> list[Ranking]: ...
    def __call__(self, images: Picture | Sequence[Picture] | Tensor, top_k: int = 5) -> Ranking | list[Ranking]:
        """The `top_k` likeliest classes as (class, probability), likeliest first; for many images a list of these.

        An image is a path, a PIL image, or a uint8 array (height, width, channels). A float tensor is a batch that is
        preprocessed already.
        """
        if top_k < 1:
            raise UsageError(f"top_k is {top_k}; ask for 1 class or more")
        if isinstance(images, Tensor):
            return self._rank(self._checked(images), top_k)
        if isinstance(images, (str, os.PathLike, Image.Image, np.ndarray)):
            return self._rank(self.prepare([images]), top_k)[0]
        if not _are_several(images):
            raise _no_image(images)
        return self._rank(self.prepare(images), top_k) if len(images) else []

    def prepare(self, images: Sequence[Picture]) -> Tensor:
        """The batch the network gets for these images."""
        batch = torch.empty((len(images), *self.preprocessing.shape))
        for place, image in enumerate(images):
            try:
                pixels = self._augmenter.augment(self._payload(image), self._draws)
            except DataError as error:
                where = image if isinstance(image, (str, os.PathLike)) else f"image {place}"
                raise DataError(f"{where}: {error}") from error
            self._normaliser.into(batch[place].numpy(), pixels)
        return batch

    def _payload(self, image: Picture) -> bytes | NDArray[np.uint8]:
        """What the augmenter takes: encoded bytes, or pixels of the right number of channels."""
        channels = self.preprocessing.shape[0]
        if isinstance(image, (str, os.PathLike)):
            try:
                return Path(image).read_bytes()
            except OSError as error:
                raise DataError(f"cannot be read: {error.strerror}") from error
        if isinstance(image, Image.Image):
            image = np.asarray(image.convert(_MODES[channels]))
        if not isinstance(image, np.ndarray):
            raise _no_image(image)
        pixels = image[..., None] if image.ndim == 2 else image
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != channels or not pixels.size:
            raise UsageError(
                f"expected a uint8 array (height, width, {channels}), got {image.dtype} {image.shape}; "
                "a float tensor is taken as a preprocessed batch"
            )
        return pixels

    def _checked(self, batch: Tensor) -> Tensor:
        if not batch.is_floating_point() or batch.dim() != 4 or tuple(batch.shape[1:]) != self.preprocessing.shape:
            wanted = ", ".join(map(str, self.preprocessing.shape))
            raise UsageError(f"expected a float tensor (N, {wanted}), got {batch.dtype} {tuple(batch.shape)}")
        return batch.float()

    def _rank(self, batch: Tensor, top_k: int) -> list[Ranking]:
        with torch.inference_mode():
            probabilities = self.model(batch.to(self._device)).float().softmax(1)
            values, classes = probabilities.topk(min(top_k, probabilities.shape[1]))
        rows = zip(classes.tolist(), values.tolist(), strict=True)
        return [list(zip(numbers, shares, strict=True)) for numbers, shares in rows]


def _are_several(given: object) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, (bytes, bytearray))


def _no_image(given: object) -> UsageError:
    hint = "; open encoded bytes with PIL.Image.open(io.BytesIO(...))" if isinstance(given, (bytes, bytearray)) else ""
    return UsageError(f"an image is a path, a PIL image or a uint8 array, not {type(given).__name__}{hint}")


def _usable(device: torch.device | str) -> torch.device:
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (AssertionError, RuntimeError) as error:  # what torch raises depends on how it was built
        why = str(error).partition("\n")[0]
        raise UsageError(f"device {str(device)!r} cannot be used here: {why}; use 'cpu'") from error
    return found


def model_of(snapshot: Snapshot, path: str | os.PathLike[str]) -> nn.Module:
    """The network a snapshot is of, with its weights or their average, on the processor; `path` is for messages."""
    facts = _typed({**_options(snapshot), **snapshot.facts}, _Network, path)
    with torch.random.fork_rng(devices=[]):  # building draws initial weights, which are not used
        model = models.build(
            facts.network,
            num_classes=facts.num_classes,
            image_shape=facts.image_shape,
            num_layers=facts.num_layers,
            **facts.network_options,
        )
    try:
        model.load_state_dict(averaged(snapshot.weights, snapshot.extra))
    except RuntimeError as error:
        raise DataError(f"{os.fspath(path)} has other weights than its network {facts.network!r}: {error}") from error
    return model


def preprocessing_of(snapshot: Snapshot, path: str | os.PathLike[str], resize: int = -1) -> AugmentConfig:
    """What validation did to an image before the network got it; the training's options say it, or else the facts."""
    facts = _typed({**snapshot.facts, **_options(snapshot)}, _Preprocessing, path)
    return AugmentConfig(shape=facts.image_shape, resize=resize, rgb_mean=facts.rgb_mean, rgb_std=facts.rgb_std)


def _options(snapshot: Snapshot) -> dict[str, Any]:
    """What the training was told, without what it was left to find out."""
    return {name: value for name, value in (snapshot.facts.get("options") or {}).items() if value is not None}


def _typed(facts: dict[str, Any], kind: type[_Kind], path: str | os.PathLike[str]) -> _Kind:
    try:
        return msgspec.convert(facts, kind)
    except msgspec.ValidationError as error:
        there = ", ".join(sorted(facts)) or "nothing"
        raise DataError(f"the facts of the checkpoint {os.fspath(path)} do not do: {error}; it has {there}") from error
