"""The table of data sets: their names, how to open them, and how their images are augmented by default.

To add one, write a function that returns a Dataset, and add it to DATASETS and its augmentation to DEFAULT_AUGMENT.

`open_dataset(name, options)` returns a Dataset: a training and a validation source. `make_loader` returns the fastest
loader for a source: small sets are kept decoded (`loading.memory`), others are decoded while they are used
(`loading.loader`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from echelon.data.images.config import IMAGENET_MEAN, AugmentConfig
from echelon.data.loading.loader import Batches, Loader
from echelon.data.loading.memory import MemoryLoader, MemorySource, is_plain
from echelon.data.loading.order import Sampling, State
from echelon.data.loading.sources import FolderSource, RecordSource, Source, is_work_for_processes
from echelon.data.sets.builtin import SyntheticLoader, SyntheticSource, load_digits
from echelon.data.sets.find import DataOptions as DataOptions
from echelon.data.sets.find import count_classes, file_in_data_dir, load_into_memory, load_published, open_images
from echelon.errors import UsageError
from echelon.suggestions import unknown_name

AnySource: TypeAlias = Source | SyntheticSource

_FIXED_FILES = ("digits", "mnist", "fashion-mnist")  # these take no --data-train or --data-val
_FIXED_CHANNELS = (*_FIXED_FILES, "cifar10")  # kept decoded, so the number of channels cannot change


@dataclass(frozen=True, slots=True)
class Dataset:
    """An open data set. `augment` is its default augmentation; flags replace single fields of it."""

    name: str
    train: AnySource
    validation: Source | None
    num_classes: int
    augment: AugmentConfig

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the network's input."""
        return self.augment.shape


def open_dataset(name: str, options: DataOptions | None = None) -> Dataset:
    """Open a data set by name. An error says which file is missing, where it was searched, and how to get it."""
    if name not in DATASETS:
        raise unknown_name("data set", name, DATASETS)
    options = options or DataOptions()
    check_files(name, options)
    dataset = DATASETS[name](options)
    num_classes = options.num_classes or dataset.num_classes
    for source in (dataset.train, dataset.validation):
        _limit_labels(source, num_classes)
    return replace(dataset, num_classes=num_classes, augment=default_augment(name, options.image_shape))


def default_augment(name: str, image_shape: tuple[int, int, int] | None = None, **given: Any) -> AugmentConfig:
    """Return a data set's default augmentation with the given fields replaced. Reads no file."""
    augment = DEFAULT_AUGMENT[name]
    channels, height, width = shape = image_shape or augment.shape
    has = augment.shape[0]
    if name in _FIXED_CHANNELS and channels != has:
        raise UsageError(
            f"{name} has images of {has} channel{'s' * (has > 1)}, but the image shape {channels},{height},{width} "
            f"has {channels}; use {has},{height},{width}"
        )
    return replace(augment, **{"shape": shape, **given})


def check_files(name: str, options: object) -> None:
    """Raise UsageError if files are given for a set that has its own. `options` has the fields of DataOptions."""
    if name in _FIXED_FILES:
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
    prefetch: int = 2,
    exact: bool = False,
    skip_bad_records: bool = False,
    state: State | None = None,
) -> Batches:
    """Return the fastest loader of float batches. For validation, use `augment.for_validation()` and exact=True."""
    if isinstance(source, SyntheticSource):
        size, count = sampling.batch_size, sampling.num_batches
        return SyntheticLoader(source, size, seed=sampling.seed, num_batches=count, state=state)
    if isinstance(source, MemorySource) and is_plain(augment, *source.images.shape[1:3]):
        return MemoryLoader(source, augment, sampling, state=state)
    return Loader(
        source,
        augment,
        sampling,
        threads=threads,
        processes=is_work_for_processes(source),
        prefetch=prefetch,
        exact=exact,
        skip_bad_records=skip_bad_records,
        state=state,
    )


def _digits(options: DataOptions) -> Dataset:
    return Dataset("digits", *load_digits(), 10, DEFAULT_AUGMENT["digits"])


def _mnist(options: DataOptions) -> Dataset:
    return _idx("mnist", "MNIST", options)


def _fashion_mnist(options: DataOptions) -> Dataset:
    return _idx("fashion-mnist", "Fashion-MNIST", options)


def _idx(name: str, title: str, options: DataOptions) -> Dataset:
    return Dataset(name, *load_published(name, title, f"{name} (idx)", options), 10, DEFAULT_AUGMENT[name])


def _cifar10(options: DataOptions) -> Dataset:
    augment = DEFAULT_AUGMENT["cifar10"]
    if options.data_train or file_in_data_dir(options, "cifar10_train.rec"):
        train, validation = open_images("cifar10", options, "cifar10_train.rec", "cifar10_val.rec")
        for source in (train, validation):
            _limit_labels(source, options.num_classes or 10)  # before they are decoded
        held_out = load_into_memory(validation, options) if validation is not None else None
        return Dataset("cifar10", load_into_memory(train, options), held_out, 10, augment)
    is_python = file_in_data_dir(options, "cifar-10-batches-py/data_batch_1")
    format_name = "cifar10 (python)" if is_python else "cifar10 (binary)"
    return Dataset("cifar10", *load_published("cifar10", "CIFAR-10", format_name, options), 10, augment)


def _imagenet(options: DataOptions) -> Dataset:
    return _images("imagenet", options, 1000)


def _folder(options: DataOptions) -> Dataset:
    return _images("folder", options, None)


def _images(name: str, options: DataOptions, num_classes: int | None) -> Dataset:
    """Open record files, or folders with one subfolder per class."""
    train, validation = open_images(name, options, "train.rec", "val.rec")
    found = num_classes or options.num_classes or count_classes(train, options)
    return Dataset(name, train, validation, found, DEFAULT_AUGMENT[name])


def _synthetic(options: DataOptions) -> Dataset:
    shape, num_classes = options.image_shape or (3, 224, 224), options.num_classes or 1000
    source = SyntheticSource(shape, num_classes, options.num_examples or 1281167)
    return Dataset("synthetic", source, None, num_classes, DEFAULT_AUGMENT["synthetic"])


_IDX = AugmentConfig(shape=(1, 28, 28), rgb_mean=(0.0,), rgb_std=(255.0,))
_PHOTOGRAPHS = AugmentConfig(rgb_mean=IMAGENET_MEAN)
DEFAULT_AUGMENT: dict[str, AugmentConfig] = {
    "digits": AugmentConfig(shape=(1, 8, 8), rgb_mean=(4.8,), rgb_std=(8.0,)),  # pixels are 0 ... 16
    "mnist": _IDX,
    "fashion-mnist": _IDX,
    # 32x32 images are padded by 4 to 40x40, cropped to a random 28x28 and mirrored; validation crops the centre 28x28.
    "cifar10": AugmentConfig(
        shape=(3, 28, 28), random_crop=True, random_mirror=True, pad_size=4, rgb_mean=IMAGENET_MEAN
    ),
    "imagenet": _PHOTOGRAPHS,
    "folder": _PHOTOGRAPHS,
    "synthetic": AugmentConfig(),
}
DATASETS: dict[str, Callable[[DataOptions], Dataset]] = {
    "digits": _digits,
    "mnist": _mnist,
    "fashion-mnist": _fashion_mnist,
    "cifar10": _cifar10,
    "imagenet": _imagenet,
    "folder": _folder,
    "synthetic": _synthetic,
}


def dataset_names() -> Sequence[str]:
    """Return the names that `open_dataset` accepts."""
    return tuple(DATASETS)
