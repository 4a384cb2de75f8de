"""The input of a run: the data set with the requested augmentation, and the fastest loader for the device."""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch

from echelon.data.loading.device import DeviceLoader, DeviceMemoryLoader
from echelon.data.loading.loader import Batches, Loader, measure_io
from echelon.data.loading.memory import MemorySource, is_plain
from echelon.data.loading.order import Plans, Sampling, State
from echelon.data.loading.sources import is_work_for_processes
from echelon.data.sets.builtin import SyntheticSource
from echelon.data.sets.datasets import DataOptions, Dataset, make_loader, open_dataset
from echelon.train.log_lines import io_line
from echelon.train.recipe.options import TrainOptions
from echelon.train.recipe.plan import ProcessRank, sampling_for

log = logging.getLogger(__name__)


def open_data(options: TrainOptions) -> Dataset:
    """Open the data set of the options, with their augmentation."""
    data_options = DataOptions(
        data_dir=options.data_dir,
        data_train=options.data_train,
        data_train_idx=options.data_train_idx,
        data_val=options.data_val,
        data_val_idx=options.data_val_idx,
        image_shape=options.image_shape,
        num_classes=options.num_classes,
        num_examples=options.num_examples,
        skip_bad_records=options.skip_bad_records,
    )
    dataset = open_dataset("synthetic" if options.benchmark else options.data, data_options)
    given: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in options.augment.items()}
    return replace(dataset, augment=replace(dataset.augment, **given))


def read_only(options: TrainOptions, dataset: Dataset) -> int:
    """Read the training data without training, and log the speed; returns the exit status."""
    sampling = sampling_for(options, len(dataset.train), ProcessRank(0, 1), fixed=False)
    with closing(train_loader(options, dataset, sampling, torch.device("cpu"))) as loader:
        for batch, samples_per_s in measure_io(loader, options.disp_batches):
            log.info(io_line(batch, samples_per_s))
    return 0


def train_loader(
    options: TrainOptions,
    dataset: Dataset,
    sampling: Sampling,
    device: torch.device,
    state: State | None = None,
    plans: Plans | None = None,
) -> Batches:
    """Make a loader that starts at `state`, or reads the batches of `plans`.

    On a GPU, small data sets stay in its memory; others are sent as uint8.
    """
    source, augment = dataset.train, dataset.augment
    on_gpu = device.type == "cuda"
    if on_gpu and isinstance(source, MemorySource) and is_plain(augment, *source.images.shape[1:3]):
        return DeviceMemoryLoader(source, augment, sampling, device, state=state, plans=plans)
    if on_gpu and not isinstance(source, SyntheticSource):
        return DeviceLoader(
            Loader(
                source,
                augment,
                sampling,
                threads=options.data_nthreads,
                processes=is_work_for_processes(source),
                output="uint8",
                pin_memory=True,
                skip_bad_records=options.skip_bad_records,
                state=state,
                plans=plans,
            ),
            augment,
            device,
        )
    return make_loader(
        source,
        augment,
        sampling,
        threads=options.data_nthreads,
        skip_bad_records=options.skip_bad_records,
        state=state,
        plans=plans,
    )
