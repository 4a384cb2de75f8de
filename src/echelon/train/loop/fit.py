"""Assembles a training run from its options: data, network, optimizer, store and trainer; then `Run` trains."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace

import torch
from torch import nn

from echelon import models
from echelon.data.sets.datasets import Dataset
from echelon.environment import Job
from echelon.errors import UsageError
from echelon.kvstore import create
from echelon.schemes.stores import store_kind
from echelon.train import log_lines
from echelon.train.flags.check import check_with_data
from echelon.train.loop.inputs import open_data, read_only
from echelon.train.loop.reporting import TrainingProgress
from echelon.train.loop.run import Run
from echelon.train.recipe.optimizers import make_optimizer
from echelon.train.recipe.options import TrainOptions
from echelon.train.recipe.plan import worker_batch
from echelon.train.step.precision import choose_precision
from echelon.train.trainer.base import Trainer

log = logging.getLogger(__name__)


def fit(options: TrainOptions, run_dir: str | None = None, progress: TrainingProgress | None = None) -> int:
    """Train as one process of the job that the environment describes; returns the exit status."""
    job = Job.from_environment()
    device = torch.device(options.devices[job.device_index])
    dataset = open_data(options)
    if job.device_index == 0:
        log.info(log_lines.start_line(asdict(options)))
    batch = worker_batch(options, len(dataset.train), job.num_workers)
    if batch != options.batch_size:
        log.info("--batch-size %d is more than a worker's share of an epoch: using %d", options.batch_size, batch)
        options = replace(options, batch_size=batch)
    if options.test_io:
        return read_only(options, dataset)
    check_with_data(options, dataset)
    _prepare_device(device)
    torch.manual_seed(options.seed)
    model = _make_network(options, dataset, device)
    trainer = _make_trainer(options, model, device, job.num_workers)
    return Run(options, dataset, trainer, device, run_dir, job.device_index, progress).run()


def _make_trainer(options: TrainOptions, model: nn.Module, device: torch.device, num_workers: int) -> Trainer:
    kind = store_kind(options.kv_store)
    optimizer = make_optimizer(
        options.optimizer,
        model,
        lr=options.lr,
        momentum=options.momentum,
        weight_decay=options.weight_decay,
        warmup_strategy=options.warmup_strategy,
        batch_size=options.batch_size * (num_workers if kind.lock_step and kind.spans_workers else 1),
        seed=options.seed,
    )
    kvstore = create(
        options.kv_store,
        staleness=options.staleness,
        groups=options.groups,
        check_finite=options.check_finite,
        device=device,
    )
    return Trainer(
        model,
        optimizer,
        kvstore,
        average_buffers=options.average_buffers,
        check_finite=options.check_finite,
        overlap=options.dtype != "float16",  # float16 gradients are checked and unscaled before they are sent
        push_factors=options.push_factors and options.engine != "compile" and not options.monitor,
    )


def _make_network(options: TrainOptions, dataset: Dataset, device: torch.device) -> nn.Module:
    """Build the network on the device, in the layout of its fastest kernels, and check its outputs on this data."""
    model = models.build(
        options.network,
        num_classes=dataset.num_classes,
        image_shape=dataset.image_shape,
        num_layers=options.num_layers,
        initializer=options.initializer,
        **options.network_options,
    ).to(device)
    if device.type == "cuda":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with choose_precision(options.dtype, device).autocast():
        models.check_outputs(
            options.network,
            model,
            num_classes=dataset.num_classes,
            image_shape=dataset.image_shape,
            device=device,
        )
    return model


def _prepare_device(device: torch.device) -> None:
    if device.type != "cuda":
        return
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise UsageError(f"there is no GPU {device.index}; this machine has {torch.cuda.device_count()}")
    torch.cuda.set_device(device)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.benchmark_limit = 0  # try all algorithms, not the first ten
    torch.set_float32_matmul_precision("high")
