"""Predictions with the network of a checkpoint, in three lines:

    from echelon.train.predict import Predictor
    predict = Predictor.load("runs/latest")  # or "prefix-0012.safetensors"
    [(predict.name(number), probability) for number, probability in predict("photo.jpg")]

This module turns a checkpoint into a network in eval mode, and preprocesses images as validation did: with the shape,
centre crop, mean and std that the checkpoint's metadata holds. A network named package.module:function is imported, so
load such checkpoints only from people whose code you would run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self, TypeAlias, TypeVar, overload

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from echelon import models
from echelon.data.images.augment import Augmenter, Normaliser
from echelon.data.images.config import AugmentConfig
from echelon.data.images.decode import in_eight_bits, inspect
from echelon.data.images.geometry import num_draws
from echelon.errors import DataError, UsageError
from echelon.train.checkpoint.format import Checkpoint
from echelon.train.checkpoint.names import load_model
from echelon.train.step.average import averaged

Picture: TypeAlias = str | os.PathLike[str] | Image.Image | NDArray[np.uint8]
Ranking: TypeAlias = list[tuple[int, float]]

_Struct = TypeVar("_Struct", bound=msgspec.Struct)

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_MAX_FILE_BYTES = 1 << 30  # a device such as /dev/zero never ends


class TrainedNetwork(msgspec.Struct):
    """What the metadata of a checkpoint says about its network."""

    network: str
    num_classes: int
    image_shape: tuple[int, int, int]
    num_layers: int | None = None
    network_options: dict[str, Any] = {}  # msgspec copies it for each instance


class _Classes(msgspec.Struct):
    classes: tuple[str, ...] = ()  # checkpoints of older versions have no names


class _Preprocessing(msgspec.Struct):
    image_shape: tuple[int, int, int]
    rgb_mean: tuple[float, ...]
    rgb_std: tuple[float, ...]


class Predictor:
    """A network with the preprocessing it was validated with, and the names of its classes. Not thread-safe."""

    def __init__(
        self,
        model: nn.Module,
        preprocessing: AugmentConfig,
        device: torch.device | str = "cpu",
        classes: Sequence[str] = (),
        *,
        scale_down: bool = False,
    ) -> None:
        self.classes = tuple(classes)
        self._device = _usable(device)
        self.model = model.to(self._device).eval()
        self.preprocessing = preprocessing
        self._augmenter = Augmenter(preprocessing, fast=False)
        self._largest = max(preprocessing.shape[1:]) * 8 // 7
        self._scaling = Augmenter(replace(preprocessing, resize=self._largest), fast=False) if scale_down else None
        self._normaliser = Normaliser(preprocessing)
        self._draws = [0.0] * num_draws(preprocessing)  # preprocessing is not random

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        device: torch.device | str = "cpu",
        *,
        epoch: int | None = None,
        resize: int = -1,
        scale_down: bool = False,
    ) -> Self:
        """Load the network of a checkpoint file, a run folder, or of a prefix the newest checkpoint or that of `epoch`.

        With `resize`, the shorter edge of an image is first scaled to that length. Validation crops without resizing,
        because its images already have a suitable size; photographs need `resize` or `scale_down`. With `scale_down`,
        only images whose shorter edge is longer than 8/7 of the network's input are scaled, down to that length. It is
        the size at which MXNet's scripts validate: they crop 224 of 256 pixels, or 28 of CIFAR-10's 32.
        """
        checkpoint, path = load_model(path, epoch)
        model, preprocessing = model_of(checkpoint, path), preprocessing_of(checkpoint, path, resize)
        return cls(model, preprocessing, device, classes_of(checkpoint, path), scale_down=scale_down)

    @overload  # a str is also a Sequence; the first signature matches it
    def __call__(self, images: Picture, top_k: int = 5) -> Ranking: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, images: Sequence[Picture] | Tensor, top_k: int = 5) -> list[Ranking]: ...
    def __call__(self, images: Picture | Sequence[Picture] | Tensor, top_k: int = 5) -> Ranking | list[Ranking]:
        """Return the `top_k` likeliest classes as (class, probability), likeliest first; for several images, a list.

        An image is a path, a PIL image, or a uint8 array (height, width, channels). A float tensor is a batch that is
        already preprocessed.
        """
        if top_k < 1:
            raise UsageError(f"top_k is {top_k}; ask for 1 class or more")
        if isinstance(images, Tensor):
            return self._rank(self._checked(images), top_k)
        if isinstance(images, (str, os.PathLike, Image.Image, np.ndarray)):
            return self._rank(self.prepare([images]), top_k)[0]
        if not _is_sequence(images):
            raise _not_an_image(images)
        return self._rank(self.prepare(images), top_k) if len(images) else []

    def name(self, number: int) -> str:
        """Return the name of a class, or its number if the checkpoint has no name for it."""
        return (self.classes[number] if number < len(self.classes) else "") or str(number)

    def prepare(self, images: Sequence[Picture]) -> Tensor:
        """Preprocess images into a batch for the network."""
        batch = torch.empty((len(images), *self.preprocessing.shape))
        for place, image in enumerate(images):
            try:
                payload = self._payload(image)
                pixels = self._augmenter_for(payload).augment(payload, self._draws)
            except DataError as error:
                where = image if isinstance(image, (str, os.PathLike)) else f"image {place}"
                raise DataError(f"{where}: {error}") from error
            self._normaliser.into(batch[place].numpy(), pixels)
        return batch

    def _augmenter_for(self, payload: bytes | NDArray[np.uint8]) -> Augmenter:
        if self._scaling is None:
            return self._augmenter
        size = payload.shape[:2] if isinstance(payload, np.ndarray) else _size(payload)
        return self._scaling if min(size) > self._largest else self._augmenter

    def _payload(self, image: Picture) -> bytes | NDArray[np.uint8]:
        """Return encoded bytes, or pixels with the right number of channels, for the augmenter."""
        channels = self.preprocessing.shape[0]
        if isinstance(image, (str, os.PathLike)):
            try:
                with open(image, "rb") as stream:
                    data = stream.read(_MAX_FILE_BYTES + 1)
            except OSError as error:
                raise DataError(f"cannot be read: {error.strerror}") from error
            if len(data) > _MAX_FILE_BYTES:
                raise DataError(f"has more than {_MAX_FILE_BYTES >> 20} MiB, so it is not an image")
            return data
        if isinstance(image, Image.Image):
            image = np.asarray(in_eight_bits(image).convert(_MODES[channels]))
        if not isinstance(image, np.ndarray):
            raise _not_an_image(image)
        pixels = image[..., None] if image.ndim == 2 else image
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != channels or not pixels.size:
            raise UsageError(
                f"expected a uint8 array (height, width, {channels}), got {image.dtype} {image.shape}; "
                "a preprocessed batch must be a float tensor"
            )
        return pixels

    def _checked(self, batch: Tensor) -> Tensor:
        if not batch.is_floating_point() or batch.dim() != 4 or tuple(batch.shape[1:]) != self.preprocessing.shape:
            wanted = ", ".join(map(str, self.preprocessing.shape))
            raise UsageError(f"expected a float tensor (N, {wanted}), got {batch.dtype} {tuple(batch.shape)}")
        return batch.float()

    def _rank(self, batch: Tensor, top_k: int) -> list[Ranking]:
        with torch.inference_mode():
            outputs = self.model(batch.to(self._device)).float().softmax(1)
            values, classes = outputs.topk(min(top_k, outputs.shape[1]))
        rows = zip(classes.tolist(), values.tolist(), strict=True)
        return [list(zip(numbers, probabilities, strict=True)) for numbers, probabilities in rows]


def _size(payload: bytes) -> tuple[int, int]:
    info = inspect(payload)
    return info.height, info.width


def _is_sequence(given: object) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, (bytes, bytearray))


def _not_an_image(given: object) -> UsageError:
    hint = "; open encoded bytes with PIL.Image.open(io.BytesIO(...))" if isinstance(given, (bytes, bytearray)) else ""
    return UsageError(f"an image is a path, a PIL image or a uint8 array, not {type(given).__name__}{hint}")


def _usable(device: torch.device | str) -> torch.device:
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (AssertionError, RuntimeError) as error:  # which of them torch raises depends on its build
        why = str(error).partition("\n")[0]
        raise UsageError(f"device {str(device)!r} cannot be used here: {why}; use 'cpu'") from error
    return found


def model_of(checkpoint: Checkpoint, path: str | os.PathLike[str]) -> nn.Module:
    """Build a checkpoint's network on the CPU, with its weights or their moving average; `path` is for messages."""
    found = network_of(checkpoint, path)
    with torch.random.fork_rng(devices=[]):  # building draws initial weights, which are replaced
        model = models.build(
            found.network,
            num_classes=found.num_classes,
            image_shape=found.image_shape,
            num_layers=found.num_layers,
            **found.network_options,
        )
    try:
        model.load_state_dict(averaged(checkpoint.weights, checkpoint.extra))
    except RuntimeError as error:
        raise DataError(f"{os.fspath(path)}: the weights do not fit the network {found.network!r}: {error}") from error
    if spoilt := [name for name, weight in model.named_parameters() if not weight.isfinite().all()]:
        raise DataError(
            f"{os.fspath(path)}: the weight {spoilt[0]!r} has NaN or infinity, because the training diverged; use an "
            "earlier checkpoint, or train with a lower --lr"
        )
    return model


def network_of(checkpoint: Checkpoint, path: str | os.PathLike[str]) -> TrainedNetwork:
    """Return which network a checkpoint has."""
    return _typed({**_options(checkpoint), **checkpoint.metadata}, TrainedNetwork, path)


def preprocessing_of(checkpoint: Checkpoint, path: str | os.PathLike[str], resize: int = -1) -> AugmentConfig:
    """Return the preprocessing of validation images, from the options of the run or else from the metadata."""
    found = _typed({**checkpoint.metadata, **_options(checkpoint)}, _Preprocessing, path)
    return AugmentConfig(shape=found.image_shape, resize=resize, rgb_mean=found.rgb_mean, rgb_std=found.rgb_std)


def classes_of(checkpoint: Checkpoint, path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Return the names of a checkpoint's classes, as far as they are known."""
    return _typed(checkpoint.metadata, _Classes, path).classes


def _options(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the options of the run that have a value."""
    return {name: value for name, value in (checkpoint.metadata.get("options") or {}).items() if value is not None}


def _typed(values: dict[str, Any], kind: type[_Struct], path: str | os.PathLike[str]) -> _Struct:
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        names = ", ".join(sorted(values)) or "nothing"
        raise DataError(
            f"the metadata of the checkpoint {os.fspath(path)} is incomplete or invalid: {error}; it has {names}"
        ) from error
