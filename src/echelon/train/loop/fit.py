"""Assembles a training run from its options: data, network, optimizer, store and trainer; then `Run` trains."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace

import torch
from torch import nn

from echelon.environment import Job
from echelon.kvstore import create
from echelon.observe.events import append_event
from echelon.train import log_lines
from echelon.train.flags.check import check_with_data
from echelon.train.loop.feeds.inputs import open_data, read_only
from echelon.train.loop.memory import explain_memory_errors
from echelon.train.loop.network import make_network, prepare_device, shares_gpu
from echelon.train.loop.reports.reporting import TrainingProgress
from echelon.train.loop.run import Run
from echelon.train.loop.threads import set_threads
from echelon.train.pretrained import load_pretrained
from echelon.train.recipe.optimizers import make_optimizer
from echelon.train.recipe.options import TrainOptions
from echelon.train.recipe.plan import large_batch_for, worker_batch
from echelon.train.trainer.base import Trainer

log = logging.getLogger(__name__)


def fit(
    options: TrainOptions,
    run_dir: str | None = None,
    progress: TrainingProgress | None = None,
    *,
    owns_process: bool = False,
) -> int:
    """Train as one process of the job that the environment describes; returns the exit status.

    `owns_process`: this process does nothing else, so the run also sets the number of torch's threads.
    """
    job = Job.from_environment()
    device = torch.device(options.devices[job.device_index])
    if job.device_index == 0:
        append_event(job.run_dir, job.role, job.rank, "loading")
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
    prepare_device(device, shared=shares_gpu(options, device, job))
    torch.manual_seed(options.seed)

    def train() -> int:
        model = make_network(options, dataset.num_classes, dataset.image_shape, device)
        if options.pretrained_model is not None:
            load_pretrained(model, options, dataset.num_classes, dataset.image_shape)
        if owns_process:
            set_threads(options, job, dataset, model, device)
        trainer = _make_trainer(options, model, device, len(dataset.train), job.num_workers)
        return Run(options, dataset, trainer, device, run_dir, job.device_index, job.num_workers, progress).run()

    return explain_memory_errors(train, options, dataset.num_classes, dataset.image_shape, device)


def _make_trainer(
    options: TrainOptions, model: nn.Module, device: torch.device, num_samples: int, num_workers: int
) -> Trainer:
    optimizer = make_optimizer(
        options.optimizer,
        model,
        lr=options.lr,
        momentum=options.momentum,
        weight_decay=options.weight_decay,
        style=options.optimizer_style,
        clip_gradient=options.clip_gradient,
        large_batch=large_batch_for(options, num_samples, num_workers),
        seed=options.seed,
    )
    kvstore = create(
        options.kv_store,
        staleness=options.staleness,
        groups=options.groups,
        lr_scale=options.lr_scale,
        check_finite=options.check_finite,
        device=device,
    )
    return Trainer(
        model,
        optimizer,
        kvstore,
        average_buffers=options.average_buffers,
        check_finite=options.check_finite,
        lazy_pull=options.engine != "compile",  # whose graph the waiting modules would divide
        overlap=options.dtype != "float16",  # float16 gradients are checked and unscaled before they are sent
        max_grad_norm=options.max_grad_norm,
        push_factors=options.push_factors and options.engine != "compile" and not options.monitor,
    )
