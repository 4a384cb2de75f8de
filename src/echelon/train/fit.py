"""The built-in training loop, as one worker runs it."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from echelon import models
from echelon.cluster.shares import parse_shares
from echelon.data.datasets import DataOptions, Dataset, make_loader, open_dataset
from echelon.data.order import Sampling
from echelon.data.pipeline import Batches
from echelon.data.sharding import ByFraction, ByPart, Sharding
from echelon.errors import UsageError
from echelon.kvstore import KVStore, create
from echelon.train import checkpoint
from echelon.train.options import TrainOptions
from echelon.train.pace import Pacer
from echelon.train.trainer import Trainer

EVALUATION_BATCH = 500


def fit(options: TrainOptions, run_dir: str | None) -> None:
    """Train as one worker of the job that the environment describes."""
    dataset = open_dataset(options.data, DataOptions(data_dir=options.data_dir))
    torch.manual_seed(options.seed)
    model = models.build(
        options.network,
        num_classes=dataset.num_classes,
        image_shape=dataset.image_shape,
        num_layers=options.num_layers,
    )
    optimizer = make_optimizer(options, model)
    kvstore = create(
        options.kv_store, staleness=options.staleness, groups=options.groups, check_finite=options.check_finite
    )
    trainer = Trainer(
        model,
        optimizer,
        kvstore,
        average_buffers=options.average_buffers,
        check_finite=options.check_finite,
    )
    _Worker(options, dataset, trainer, run_dir).run()


class _Worker:
    def __init__(self, options: TrainOptions, dataset: Dataset, trainer: Trainer, run_dir: str | None) -> None:
        self._options = options
        self._dataset = dataset
        self._trainer = trainer
        self._run_dir = run_dir
        self._kvstore = trainer.kvstore
        self._events = trainer.kvstore.events
        self._rank = trainer.kvstore.rank
        self._leader = self._rank == trainer.kvstore.workers[0]
        self._pacer = Pacer(options.pace, self._rank)
        self._validation = _all_of(dataset) if self._leader else None
        self._began = 0.0

    def run(self) -> None:
        """Train, meet the others, and as the leader evaluate and save what came out."""
        sampling = Sampling(
            len(self._dataset.train),
            self._options.batch_size,
            seed=self._options.seed,
            sharding=sharding_for(self._options, self._kvstore),
        )
        self._kvstore.barrier()
        self._began = time.monotonic()
        self._events.write("begin", rank=self._rank, batches_per_epoch=sampling.batches_per_epoch)
        with closing(make_loader(self._dataset.train, self._dataset.augment, sampling)) as loader:
            for epoch in range(self._options.num_epochs):
                self._train_epoch(epoch, loader)
                if self._kvstore.halted:
                    break
        self._trainer.sync()
        self._trainer.average_buffers()
        self._kvstore.retire()
        seconds = time.monotonic() - self._began
        self._events.write("done", seconds=round(seconds, 6), **self._trainer.facts())
        self._kvstore.barrier()
        if self._leader:
            self._conclude()
        self._trainer.close()

    def _train_epoch(self, epoch: int, loader: Batches) -> None:
        trainer, pacer, per_epoch = self._trainer, self._pacer, len(loader)
        every = self._options.eval_every or per_epoch
        trainer.model.train()
        for index, (images, labels) in enumerate(loader, 1):
            set_learning_rate(trainer.optimizer, self._options, epoch + (index - 1) / per_epoch)
            pacer.begin()
            loss = functional.cross_entropy(trainer.model(images), labels)
            pacer.hold(trainer.clock)
            loss.backward()  # type: ignore[no-untyped-call]
            pacer.end()
            trainer.step(len(images))
            if self._leader and trainer.clock % every == 0:
                self._evaluate(epoch + index / per_epoch)
            if self._kvstore.halted:
                return

    def _evaluate(self, epoch: float) -> None:
        if self._validation is None:
            return
        self._trainer.sync()
        accuracy, loss = evaluate(self._trainer.model, *self._validation)
        seconds = round(time.monotonic() - self._began, 6)
        self._events.write("validation", epoch=round(epoch, 3), accuracy=accuracy, loss=loss, seconds=seconds)
        target = self._options.target_accuracy
        if target is not None and accuracy >= target and not self._kvstore.halted:
            self._kvstore.halt(f"accuracy {accuracy:.4f} reached the target {target:g}")

    def _conclude(self) -> None:
        """Everybody's pushes are in: look at the final weights."""
        model = self._trainer.model
        names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._kvstore.pull(names, [self._kvstore.views(name)[0] for name in names])
        facts: dict[str, Any] = {"network": self._options.network, "clock": self._trainer.clock}
        if self._validation is not None:
            accuracy, loss = evaluate(model, *self._validation)
            self._events.write("final", accuracy=accuracy, loss=loss)
            facts |= {"accuracy": accuracy}
        if self._run_dir is not None:
            path = checkpoint.save(Path(self._run_dir), model, self._kvstore, facts)
            self._events.write("checkpoint", file=path.name)


def evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Accuracy and mean loss; the model is left in training mode."""
    model.eval()
    right, loss = 0, 0.0
    with torch.no_grad():
        for part, wanted in zip(images.split(EVALUATION_BATCH), labels.split(EVALUATION_BATCH), strict=True):  # type: ignore[no-untyped-call]
            output = model(part)
            right += int((output.argmax(1) == wanted).sum())
            loss += float(functional.cross_entropy(output, wanted, reduction="sum"))
    model.train()
    return right / len(labels), loss / len(labels)


def sharding_for(options: TrainOptions, kvstore: KVStore) -> Sharding:
    """This worker's part of the data: by its line of data_sharding, or an equal one."""
    ranks = kvstore.workers
    if not options.data_allocator:
        return ByPart(ranks.index(kvstore.rank), len(ranks))
    return ByFraction(*shares_for(options, len(ranks))[kvstore.rank])


def shares_for(options: TrainOptions, num_workers: int) -> list[tuple[float, float]]:
    """Every worker's share of the data, from the file."""
    path = Path(options.data_sharding)
    if not path.is_file():
        raise UsageError(f"--data-allocator 1 needs the file {path}; write a line 'start end' for every worker")
    return parse_shares(path.read_text(), num_workers, str(path))


def make_optimizer(options: TrainOptions, model: nn.Module) -> Optimizer:
    """The optimizer by name, with the settings it has a use for."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    lr, decay = options.lr, options.weight_decay
    match options.optimizer:
        case "sgd":
            return SGD(parameters, lr=lr, momentum=options.momentum, weight_decay=decay)
        case "adam":
            return Adam(parameters, lr=lr, weight_decay=decay)
        case "adamw":
            return AdamW(parameters, lr=lr, weight_decay=decay)
        case "rmsprop":
            return RMSprop(parameters, lr=lr, weight_decay=decay, momentum=options.momentum)
        case "adagrad":
            return Adagrad(parameters, lr=lr, weight_decay=decay)
    raise UsageError(f"there is no optimizer {options.optimizer!r}; use sgd, adam, adamw, rmsprop or adagrad")


def set_learning_rate(optimizer: Optimizer, options: TrainOptions, epoch: float) -> None:
    """The rate of this point of this worker's pass over its data: it counts samples, not server updates."""
    passed = sum(epoch >= step for step in options.lr_step_epochs)
    for group in optimizer.param_groups:
        group["lr"] = options.lr * options.lr_factor**passed


def _all_of(dataset: Dataset) -> tuple[Tensor, Tensor] | None:
    """The validation set as two tensors."""
    source = dataset.validation
    if source is None:
        return None
    sampling = Sampling(len(source), EVALUATION_BATCH, shuffle=False)
    images: list[Tensor] = []
    labels: list[Tensor] = []
    with closing(make_loader(source, dataset.augment.for_validation(), sampling, exact=True)) as loader:
        for batch_images, batch_labels in loader:
            images.append(batch_images.clone())
            labels.append(batch_labels.clone())
    return torch.cat(images), torch.cat(labels)
