"""The datasets by name: where their files are looked for, their shape and classes, and what to do without them.

`open_dataset(name, options)` gives a Dataset: a train and a validation source with the augmentation its training script
uses. `make_loader` gives the loader that suits a source. Small sets are kept decoded (`memory`), others are decoded as
they are used (`pipeline`).
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
from echelon.data.loading.synthetic import SyntheticLoader, SyntheticSource
from echelon.data.sets.digits import load_digits
from echelon.data.sets.find import DataOptions as DataOptions
from echelon.data.sets.find import count_classes, image_pair, in_memory, layout_named, named_in, small_set
from echelon.errors import UsageError
from echelon.suggestions import unknown_name

AnySource: TypeAlias = Source | SyntheticSource

_OWN_FILES = ("digits", "mnist", "fashion-mnist")
_KEPT_DECODED = (*_OWN_FILES, "cifar10")  # so their images have the channels they have


@dataclass(frozen=True, slots=True)
class Dataset:
    """An open dataset. `augment` is what its training script does by default; flags replace fields of it."""

    name: str
    train: AnySource
    validation: Source | None
    num_classes: int
    augment: AugmentConfig

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of what the network gets."""
        return self.augment.shape


def open_dataset(name: str, options: DataOptions | None = None) -> Dataset:
    """Open a dataset by name; an error says what was looked for, where, and what makes it."""
    if name not in DATASETS:
        raise unknown_name("data set", name, DATASETS)
    options = options or DataOptions()
    check_files(name, options)
    dataset = DATASETS[name](options)
    num_classes = options.num_classes or dataset.num_classes
    for source in (dataset.train, dataset.validation):
        _limit_labels(source, num_classes)
    return replace(dataset, num_classes=num_classes, augment=recipe(name, options.image_shape))


def recipe(name: str, image_shape: tuple[int, int, int] | None = None, **given: Any) -> AugmentConfig:
    """What a dataset's training script does to images, with what was given instead; no file is looked at."""
    augment = RECIPES[name]
    channels, height, width = shape = image_shape or augment.shape
    has = augment.shape[0]
    if name in _KEPT_DECODED and channels != has:
        raise UsageError(
            f"{name} has images of {has} channel{'s' * (has > 1)}, and the image shape {channels},{height},{width} "
            f"asks for {channels}; use {has},{height},{width}"
        )
    return replace(augment, **{"shape": shape, **given})


def check_files(name: str, options: object) -> None:
    """Refuse files for a set that has its own; `options` has the fields of DataOptions, among others."""
    if name in _OWN_FILES:
        for flag in ("data_train", "data_train_idx", "data_val", "data_val_idx"):
            if (value := getattr(options, flag)) is not None:
                raise UsageError(
                    f"--{flag.replace('_', '-')} {value}: {name} is a set of its own, of files in --data-dir; "
                    "for your files, use --data folder"
                )


def _limit_labels(source: AnySource | None, num_classes: int) -> None:
    """Say of a label that is no class where it is, not that a tensor's index is wrong."""
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
    """Return the fastest loader of float batches. Validation: `augment.for_validation()`, exact=True."""
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
    """Pixels are 0 ... 16; mean 4.8 and std 8 give the floats of `load_digits`."""
    train, validation = (
        MemorySource(((images + 0.6) * 8).round().byte().permute(0, 2, 3, 1).contiguous().numpy(), labels.numpy(), name)
        for (images, labels), name in zip(load_digits(), ("digits", "digits validation"), strict=True)
    )
    return Dataset("digits", train, validation, 10, RECIPES["digits"])


def _mnist(options: DataOptions) -> Dataset:
    return _idx("mnist", "MNIST", options)


def _fashion_mnist(options: DataOptions) -> Dataset:
    return _idx("fashion-mnist", "Fashion-MNIST", options)


def _idx(name: str, title: str, options: DataOptions) -> Dataset:
    train, validation = small_set(name, title, layout_named(f"{name} (idx)"), options)
    return Dataset(name, train, validation, 10, RECIPES[name])


def _cifar10(options: DataOptions) -> Dataset:
    augment = RECIPES["cifar10"]
    if options.data_train or named_in(options, "cifar10_train.rec"):
        train, validation = image_pair("cifar10", options, "cifar10_train.rec", "cifar10_val.rec")
        for source in (train, validation):
            _limit_labels(source, options.num_classes or 10)  # before they are decoded
        held_out = in_memory(validation, options) if validation is not None else None
        return Dataset("cifar10", in_memory(train, options), held_out, 10, augment)
    is_python = named_in(options, "cifar-10-batches-py/data_batch_1")
    layout = layout_named("cifar10 (python)" if is_python else "cifar10 (binary)")
    return Dataset("cifar10", *small_set("cifar10", "CIFAR-10", layout, options), 10, augment)


def _imagenet(options: DataOptions) -> Dataset:
    return _images("imagenet", options, 1000)


def _folder(options: DataOptions) -> Dataset:
    return _images("folder", options, None)


def _images(name: str, options: DataOptions, num_classes: int | None) -> Dataset:
    """Record files, or folders of one folder a class."""
    train, validation = image_pair(name, options, "train.rec", "val.rec")
    found = num_classes or options.num_classes or count_classes(train, options)
    return Dataset(name, train, validation, found, RECIPES[name])


def _synthetic(options: DataOptions) -> Dataset:
    shape, num_classes = options.image_shape or (3, 224, 224), options.num_classes or 1000
    source = SyntheticSource(shape, num_classes, options.num_examples or 1281167)
    return Dataset("synthetic", source, None, num_classes, RECIPES["synthetic"])


_IDX = AugmentConfig(shape=(1, 28, 28), rgb_mean=(0.0,), rgb_std=(255.0,))
_PHOTOGRAPHS = AugmentConfig(rgb_mean=IMAGENET_MEAN)
RECIPES: dict[str, AugmentConfig] = {
    "digits": AugmentConfig(shape=(1, 8, 8), rgb_mean=(4.8,), rgb_std=(8.0,)),
    "mnist": _IDX,
    "fashion-mnist": _IDX,
    # 32x32 images padded by 4 to 40x40, random crops of 28x28, mirrored; validation takes the middle 28x28.
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
    """The names `open_dataset` knows."""
    return tuple(DATASETS)
