"""The datasets by name: where their files are looked for, their shape and classes, and what to do without them.

`open_dataset(name, options)` gives a Dataset: a train and a validation source with the augmentation its training script
uses. `make_loader` gives the loader that suits a source. Small sets are kept decoded (`memory`), others are decoded as
they are used (`pipeline`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TypeAlias

import numpy as np

from echelon.data.augment_config import IMAGENET_MEAN, AugmentConfig
from echelon.data.digits import load_digits
from echelon.data.layouts import LAYOUTS, Layout, find_layout
from echelon.data.memory import MemoryLoader, MemorySource, is_plain
from echelon.data.order import Sampling, State
from echelon.data.pipeline import Batches, Loader, Output
from echelon.data.published import get_command
from echelon.data.sources import FolderSource, RecordSource, Source
from echelon.data.synthetic import SyntheticLoader, SyntheticSource
from echelon.errors import DataError, UsageError

AnySource: TypeAlias = Source | SyntheticSource


@dataclass(frozen=True, slots=True)
class DataOptions:
    """What the command line says about data. Nothing set means the dataset's own defaults, under ./data."""

    data_dir: str | Path = "data"
    data_train: str | None = None
    data_train_idx: str | None = None
    data_val: str | None = None
    data_val_idx: str | None = None
    image_shape: tuple[int, int, int] | None = None
    num_classes: int | None = None
    num_examples: int | None = None
    skip_bad_records: bool = False


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
        near = get_close_matches(name, DATASETS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"no dataset {name!r}; there are {', '.join(DATASETS)}{hint}")
    options = options or DataOptions()
    dataset = DATASETS[name](options)
    shape = options.image_shape or dataset.augment.shape
    return replace(
        dataset,
        num_classes=options.num_classes or dataset.num_classes,
        augment=replace(dataset.augment, shape=shape),
    )


def make_loader(
    source: AnySource,
    augment: AugmentConfig,
    sampling: Sampling,
    *,
    threads: int = 4,
    prefetch: int = 2,
    output: Output = "float32",
    exact: bool = False,
    skip_bad_records: bool = False,
    state: State | None = None,
) -> Batches:
    """Return the fastest loader that gives what is asked for. Validation: `augment.for_validation()`, exact=True."""
    if isinstance(source, SyntheticSource):
        size, count = sampling.batch_size, sampling.num_batches
        return SyntheticLoader(source, size, seed=sampling.seed, num_batches=count, state=state)
    if isinstance(source, MemorySource) and output == "float32" and is_plain(augment, *source.images.shape[1:3]):
        return MemoryLoader(source, augment, sampling, state=state)
    return Loader(
        source,
        augment,
        sampling,
        threads=threads,
        prefetch=prefetch,
        output=output,
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
    return Dataset("digits", train, validation, 10, AugmentConfig(shape=(1, 8, 8), rgb_mean=(4.8,), rgb_std=(8.0,)))


def _mnist(options: DataOptions) -> Dataset:
    return _idx("mnist", "MNIST", options)


def _fashion_mnist(options: DataOptions) -> Dataset:
    return _idx("fashion-mnist", "Fashion-MNIST", options)


def _idx(name: str, title: str, options: DataOptions) -> Dataset:
    train, validation = _small(name, title, _layout("mnist (idx)"), options)
    return Dataset(name, train, validation, 10, AugmentConfig(shape=(1, 28, 28), rgb_mean=(0.0,), rgb_std=(255.0,)))


def _cifar10(options: DataOptions) -> Dataset:
    """32x32 images padded by 4 to 40x40, random crops of 28x28, mirrored; validation takes the middle 28x28."""
    augment = AugmentConfig(shape=(3, 28, 28), random_crop=True, random_mirror=True, pad_size=4, rgb_mean=IMAGENET_MEAN)
    if options.data_train or _in(options, "cifar10_train.rec"):
        sources = _record_pair("cifar10", options, "cifar10_train.rec", "cifar10_val.rec")
        train, validation = (MemorySource.from_source(source) if source else None for source in sources)
        assert train is not None
        return Dataset("cifar10", train, validation, 10, augment)
    layout = _layout("cifar10 (python)" if _in(options, "cifar-10-batches-py/data_batch_1") else "cifar10 (binary)")
    return Dataset("cifar10", *_small("cifar10", "CIFAR-10", layout, options), 10, augment)


def _imagenet(options: DataOptions) -> Dataset:
    return _images("imagenet", options, 1000)


def _folder(options: DataOptions) -> Dataset:
    return _images("folder", options, None)


def _images(name: str, options: DataOptions, num_classes: int | None) -> Dataset:
    """Record files where they are given or there; otherwise one folder a class, under train and val if there are."""
    augment = AugmentConfig(rgb_mean=IMAGENET_MEAN)
    root = Path(options.data_train or options.data_dir)
    if root.is_dir() and not list(root.glob("*.rec")):
        train = FolderSource.from_classes(root / "train" if (root / "train").is_dir() else root)
        held_out = Path(options.data_val) if options.data_val else root / "val"
        validation = FolderSource.from_classes(held_out, train.classes) if held_out.is_dir() else None
        return Dataset(name, train, validation, num_classes or len(train.classes), augment)
    source, held_out_source = _record_pair(name, options, "train.rec", "val.rec")
    assert source is not None
    return Dataset(name, source, held_out_source, num_classes or options.num_classes or _count_classes(source), augment)


def _count_classes(source: RecordSource) -> int:
    """One more than the largest label; reads every record's head, about 0.3 million a second."""
    return 1 + int(max(np.max(source.read(number).label) for number in range(len(source))))


def _synthetic(options: DataOptions) -> Dataset:
    shape, num_classes = options.image_shape or (3, 224, 224), options.num_classes or 1000
    source = SyntheticSource(shape, num_classes, options.num_examples or 1281167)
    return Dataset("synthetic", source, None, num_classes, AugmentConfig(shape=shape))


def _record_pair(
    name: str, options: DataOptions, train_name: str, val_name: str
) -> tuple[RecordSource, RecordSource | None]:
    train = options.data_train or str(Path(options.data_dir) / train_name)
    if not options.data_train and not Path(train).is_file():
        raise DataError(
            f"{name}: no file {train_name} and no class folders in {Path(options.data_dir).absolute()}; make it: "
            f"echelon data im2rec {Path(train).with_suffix('')} FOLDER, or name yours with --data-train"
        )
    validation = options.data_val or (_in(options, val_name) if not options.data_train else None)
    on_bad = (lambda error: None) if options.skip_bad_records else None
    return (
        RecordSource(train, options.data_train_idx, on_bad),
        RecordSource(validation, options.data_val_idx, on_bad) if validation else None,
    )


def _small(name: str, title: str, layout: Layout, options: DataOptions) -> tuple[MemorySource, MemorySource]:
    """Load a published set, from the folder itself or the one below it with the set's name."""
    root = Path(options.data_dir)
    folders = [below for folder in (root / name, root) for below in (folder, folder / layout.folder)]
    first = layout.train[0]
    for folder in folders:
        if any((folder / found).is_file() for found in (first, first + ".gz", first.replace("-idx", ".idx"))):
            parts = find_layout(folder).parts
            return _load(layout, parts.get("train", []), title), _load(layout, parts.get("val", []), title)
    looked, command = ", ".join(str(folder.absolute()) for folder in folders), get_command(name, options.data_dir)
    raise DataError(f"{title}: no file {first} (or {first}.gz) in any of {looked}; get the set: {command}")


def _load(layout: Layout, files: list[Path], title: str) -> MemorySource:
    if not files:
        raise DataError(f"{title}: only a part of {', '.join(layout.train + layout.val)} is there; get the rest")
    blocks = list(layout.read(files, layout.num_classes, None))
    images = np.concatenate([block.images for block in blocks])
    labels = np.concatenate([block.labels for block in blocks])
    return MemorySource(images if images.ndim == 4 else images[..., None], labels, os.fspath(files[0].parent))


def _in(options: DataOptions, name: str) -> str | None:
    path = Path(options.data_dir) / name
    return str(path) if path.is_file() else None


def _layout(name: str) -> Layout:
    return next(layout for layout in LAYOUTS if layout.name == name)


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
