"""The table of data sets: how each is opened, and how its images are augmented by default.

To add a data set, write a function that opens its sources, and add a line to `_TABLE`.

`open_dataset(name, options)` returns a Dataset: a training and a validation source. `make_loader` returns the fastest
loader for a source: small sets are kept decoded (`loading.memory`), others are decoded while they are used
(`loading.loader`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from echelon.data.images.config import IMAGENET_MEAN, AugmentConfig
from echelon.data.loading.loader import Batches, Loader
from echelon.data.loading.memory import MemoryLoader, MemorySource, is_plain
from echelon.data.loading.order import Plans, Sampling, State
from echelon.data.loading.sources import FolderSource, RecordSource, Source, is_work_for_processes
from echelon.data.records.class_file import ClassNames, readable
from echelon.data.sets.builtin import SyntheticLoader, SyntheticSource, load_digits
from echelon.data.sets.class_names import CIFAR10, DIGITS
from echelon.data.sets.find import DataOptions as DataOptions
from echelon.data.sets.find import count_classes, file_in_data_dir, load_into_memory, load_published, open_images
from echelon.data.sets.formats import FORMATS
from echelon.errors import UsageError, unknown_name

AnySource: TypeAlias = Source | SyntheticSource


class Opened(NamedTuple):
    """What the function of a data set returns. `classes` are the names of the classes, as far as they are known."""

    train: AnySource
    validation: Source | None
    num_classes: int
    classes: ClassNames = ()


@dataclass(frozen=True, slots=True)
class Dataset:
    """An open data set. `augment` is its default augmentation; flags replace single fields of it.

    `classes` are the names of the classes, from number 0 on; there may be fewer names than classes, or none.
    """

    name: str
    train: AnySource
    validation: Source | None
    num_classes: int
    augment: AugmentConfig
    classes: ClassNames = ()

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the network's input."""
        return self.augment.shape


def dataset_names() -> Sequence[str]:
    """Return the names that `open_dataset` accepts."""
    return tuple(_TABLE)


def open_dataset(name: str, options: DataOptions | None = None) -> Dataset:
    """Open a data set by name. An error says which file is missing, where it was searched, and how to get it."""
    if name not in _TABLE:
        raise unknown_name("data set", name, _TABLE)
    options = options or DataOptions()
    check_files(name, options)
    train, validation, num_classes, classes = _TABLE[name].open(options)
    num_classes = options.num_classes or num_classes
    for source in (train, validation):
        _limit_labels(source, num_classes)
    augment = default_augment(name, options.image_shape)
    return Dataset(name, train, validation, num_classes, augment, tuple(map(readable, classes[:num_classes])))


def default_augment(name: str, image_shape: tuple[int, int, int] | None = None, **given: Any) -> AugmentConfig:
    """Return a data set's default augmentation with the given fields replaced. Reads no file."""
    entry = _TABLE[name]
    channels, height, width = shape = image_shape or entry.augment.shape
    has = entry.augment.shape[0]
    if entry.fixed_channels and channels != has:
        raise UsageError(
            f"{name} has images of {has} channel{'s' * (has > 1)}, but the image shape {channels},{height},{width} "
            f"has {channels}; use {has},{height},{width}"
        )
    return replace(entry.augment, **{"shape": shape, **given})


def check_files(name: str, options: object) -> None:
    """Raise UsageError if files are given for a set that has its own. `options` has the fields of DataOptions."""
    if _TABLE[name].fixed_files:
        for flag in ("data_train", "data_train_idx", "data_val", "data_val_idx"):
            if (value := getattr(options, flag)) is not None:
                raise UsageError(
                    f"--{flag.replace('_', '-')} {value} cannot be used with {name}, which reads its own files in "
                    "--data-dir; use --data folder for your files"
                )


def _limit_labels(source: AnySource | None, num_classes: int) -> None:
    """Make a label that is too large raise an error that names the sample."""
    if isinstance(source, RecordSource):
        source.num_classes = num_classes
    elif isinstance(source, MemorySource | FolderSource) and np.max(source.labels) >= num_classes:
        number = int(np.argmax(source.labels))
        allowed = f"--num-classes {num_classes} allows 0 ... {num_classes - 1}"
        raise UsageError(f"{source.where(number)}: its label is {source.labels[number]:g}, but {allowed}")


def make_loader(
    source: AnySource,
    augment: AugmentConfig,
    sampling: Sampling,
    *,
    threads: int = 4,
    exact: bool = False,
    skip_bad_records: bool = False,
    state: State | None = None,
    plans: Plans | None = None,
) -> Batches:
    """Return the fastest loader of float batches. For validation, use `augment.for_validation()` and exact=True.

    `plans`: batches of leases; synthetic data has none.
    """
    if isinstance(source, SyntheticSource):
        size, count = sampling.batch_size, sampling.batches_per_epoch
        return SyntheticLoader(source, size, seed=sampling.seed, num_batches=count, state=state)
    if isinstance(source, MemorySource) and is_plain(augment, *source.images.shape[1:3]):
        return MemoryLoader(source, augment, sampling, state=state, plans=plans)
    return Loader(
        source,
        augment,
        sampling,
        threads=threads,
        processes=is_work_for_processes(source),
        exact=exact,
        skip_bad_records=skip_bad_records,
        state=state,
        plans=plans,
    )


def _open_digits(options: DataOptions) -> Opened:
    return Opened(*load_digits(), len(DIGITS), DIGITS)


def _open_idx(name: str, title: str, options: DataOptions) -> Opened:
    return _open_published(name, title, f"{name} (idx)", options)


def _open_published(name: str, title: str, format_name: str, options: DataOptions) -> Opened:
    classes = FORMATS[format_name].classes
    return Opened(*load_published(name, title, format_name, options), len(classes), classes)


def _open_cifar10(options: DataOptions) -> Opened:
    if options.data_train or file_in_data_dir(options, "cifar10_train.rec"):
        train, validation = open_images("cifar10", options, "cifar10_train.rec", "cifar10_val.rec")
        for source in (train, validation):
            _limit_labels(source, options.num_classes or 10)  # before they are decoded
        held_out = load_into_memory(validation, options) if validation is not None else None
        return Opened(load_into_memory(train, options), held_out, len(CIFAR10), train.classes or CIFAR10)
    is_python = file_in_data_dir(options, "cifar-10-batches-py/data_batch_1")
    format_name = "cifar10 (python)" if is_python else "cifar10 (binary)"
    return _open_published("cifar10", "CIFAR-10", format_name, options)


def _open_images(name: str, num_classes: int | None, options: DataOptions) -> Opened:
    """Open record files, or folders with one subfolder per class."""
    train, validation = open_images(name, options, "train.rec", "val.rec")
    return Opened(train, validation, num_classes or options.num_classes or count_classes(train, options), train.classes)


def _open_synthetic(options: DataOptions) -> Opened:
    shape, num_classes = options.image_shape or (3, 224, 224), options.num_classes or 1000
    return Opened(SyntheticSource(shape, num_classes, options.num_examples or 1281167), None, num_classes)


@dataclass(frozen=True, slots=True)
class _Entry:
    """One data set of the table: the function that opens it, and its default augmentation.

    With `fixed_files`, it takes no --data-train and --data-val. With `fixed_channels`, it is kept decoded, so the
    number of channels cannot change.
    """

    open: Callable[[DataOptions], Opened]
    augment: AugmentConfig
    fixed_files: bool = False
    fixed_channels: bool = False


_DIGITS = AugmentConfig(shape=(1, 8, 8), rgb_mean=(4.8,), rgb_std=(8.0,))
_IDX = AugmentConfig(shape=(1, 28, 28), rgb_mean=(0.0,), rgb_std=(255.0,))
# 32x32 images are padded by 4 to 40x40, cropped to a random 28x28 and mirrored; validation crops the centre 28x28.
_CIFAR = AugmentConfig(shape=(3, 28, 28), random_crop=True, random_mirror=True, pad_size=4, rgb_mean=IMAGENET_MEAN)
_PHOTOGRAPHS = AugmentConfig(rgb_mean=IMAGENET_MEAN)

_TABLE = {
    "digits": _Entry(_open_digits, _DIGITS, fixed_files=True, fixed_channels=True),
    "mnist": _Entry(partial(_open_idx, "mnist", "MNIST"), _IDX, fixed_files=True, fixed_channels=True),
    "fashion-mnist": _Entry(
        partial(_open_idx, "fashion-mnist", "Fashion-MNIST"), _IDX, fixed_files=True, fixed_channels=True
    ),
    "cifar10": _Entry(_open_cifar10, _CIFAR, fixed_channels=True),
    "imagenet": _Entry(partial(_open_images, "imagenet", 1000), _PHOTOGRAPHS),
    "folder": _Entry(partial(_open_images, "folder", None), _PHOTOGRAPHS),
    "synthetic": _Entry(_open_synthetic, AugmentConfig()),
}
