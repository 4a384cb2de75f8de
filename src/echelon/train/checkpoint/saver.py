"""What a run saves, and how it resumes.

Rank 0's file holds the weights, the optimizer state and the random number generators. The other ranks' files hold only
what differs between ranks: BatchNorm statistics and random number generators. A resumed run continues with the same
weights to the bit, the same learning rate schedule and the same order of samples.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from torch import nn

from echelon import __version__
from echelon.data.sets.datasets import Dataset
from echelon.errors import UsageError
from echelon.train import log_lines
from echelon.train.checkpoint.compatibility import check_network_and_optimizer, check_sample_order, check_shapes
from echelon.train.checkpoint.format import Checkpoint, Tensors, save
from echelon.train.checkpoint.names import ResumeFrom, find, load_at, load_newest, path_for, prune
from echelon.train.checkpoint.random_state import capture_rng, restore_rng
from echelon.train.recipe.options import TrainOptions
from echelon.train.recipe.plan import Place
from echelon.train.step.average import MovingAverage
from echelon.train.step.precision import LossScaler
from echelon.train.trainer.base import Trainer

log = logging.getLogger(__name__)

RESULT_FILE = "checkpoint.safetensors"  # in the run directory


@dataclass(frozen=True, slots=True)
class RunPosition:
    """How far a run is: completed epochs; in the current epoch, this process's steps and all processes' samples."""

    epoch: int = 0
    batch: int = 0
    samples_done: int = 0


class Saver:
    """Writes and reads the checkpoints of one process."""

    def __init__(
        self,
        options: TrainOptions,
        place: Place,
        trainer: Trainer,
        dataset: Dataset,
        scaler: LossScaler | None,
        average: MovingAverage | None,
    ) -> None:
        self._options = options
        self._place = place
        self._trainer = trainer
        self._augment = dataset.augment
        self._num_classes = dataset.num_classes
        num_samples = len(dataset.train)
        num_examples = min(options.num_examples or num_samples, num_samples)  # per epoch
        self._order = {"seed": options.seed, "num_samples": num_samples, "num_examples": num_examples}
        self._scaler = scaler
        self._average = average

    def save(self, position: RunPosition, metrics: dict[str, float]) -> None:
        """Save this process's checkpoint if the run has a prefix. All processes call it at the same position."""
        self._trainer.sync()
        prefix, rank = self._options.model_prefix, self._place.rank
        if prefix is None:
            return
        optimizer = self._trainer.optimizer_state()  # every process calls it: each may hold a part of the state
        path = path_for(prefix, rank, position.epoch, position.batch or None)
        save(path, self._checkpoint(position, metrics, optimizer))
        prune(prefix, rank=rank)
        if rank == 0:
            log.info(log_lines.saved_line(str(path)))

    def save_result(self, directory: str, position: RunPosition, metrics: dict[str, float], optimizer: Tensors) -> Path:
        """Save the final checkpoint in the run directory, as rank 0. `optimizer` is `Trainer.optimizer_state()`."""
        path = Path(directory) / RESULT_FILE
        save(path, self._checkpoint(position, metrics, optimizer))
        return path

    def load(self) -> RunPosition:
        """Restore the checkpoint that the options name; returns its position, or the start if they name none."""
        prefix = self._options.model_prefix
        if prefix is None:
            return RunPosition()
        position = self._load(prefix)
        _check_writable(prefix)
        return position

    def _checkpoint(self, position: RunPosition, metrics: dict[str, float], optimizer: Tensors) -> Checkpoint:
        model, is_rank_0 = self._trainer.model, self._place.rank == 0
        extra = capture_rng(self._device) | (self._scaler.state() if self._scaler else {})
        if self._average is not None and is_rank_0:
            extra |= self._average.state()
        return Checkpoint(
            weights=dict(model.state_dict()) if is_rank_0 else dict(model.named_buffers()),
            optimizer=optimizer if is_rank_0 else {},
            extra=extra,
            metadata=self._metadata(position, metrics),
        )

    def _metadata(self, position: RunPosition, metrics: dict[str, float]) -> dict[str, Any]:
        options, image_shape = self._options, list(self._augment.shape)
        preprocessing = {
            "image_shape": image_shape,
            "rgb_mean": list(self._augment.rgb_mean),
            "rgb_std": list(self._augment.rgb_std),
        }
        return {
            "epoch": position.epoch,
            "batch": position.batch,
            "samples_done": position.samples_done,
            "order": self._order,
            "num_workers": self._place.num_workers,
            "num_processes": self._place.size,
            "network": options.network,
            "num_classes": self._num_classes,
            "image_shape": image_shape,
            "num_layers": options.num_layers,
            "network_options": options.network_options,
            "options": asdict(options) | preprocessing,
            "metrics": metrics,
            "version": __version__,
        }

    def _load(self, prefix: str) -> RunPosition:
        options, rank, size = self._options, self._place.rank, self._place.size
        found: ResumeFrom | None
        if options.load_epoch is not None:
            found = load_at(prefix, options.load_epoch, rank=rank, size=size)
        elif options.resume:
            found = load_newest(prefix, rank, size)
        else:
            self._warn_if_checkpoints_exist(prefix)
            return RunPosition()
        if found is None:
            log.info("there is no checkpoint %s-* to resume from: training starts from the beginning", prefix)
            return RunPosition()
        metadata, path = found.rank_0.metadata, str(found.path)
        check_network_and_optimizer(metadata, path, options, self._num_classes)
        check_sample_order(metadata, path, self._order)
        check_shapes(found.rank_0, path, self._trainer.model.state_dict(), self._augment.shape)
        self._restore(found)
        log.info(log_lines.loaded_line(prefix, metadata["epoch"]))
        return RunPosition(metadata["epoch"], metadata["batch"], metadata["samples_done"])

    def _restore(self, found: ResumeFrom) -> None:
        rank_0, own = found.rank_0, found.own
        self._trainer.load_weights(rank_0.weights)
        if rank_0.optimizer:
            self._trainer.load_optimizer_state(rank_0.optimizer)
        if own is not rank_0:
            _set_buffers(self._trainer.model, own.weights)
        restore_rng(own.extra, self._device)
        if self._scaler is not None:
            self._scaler.load(dict(own.extra))
        if self._average is not None:
            self._average.load(dict(rank_0.extra))

    def _warn_if_checkpoints_exist(self, prefix: str) -> None:
        """Warn because a later --resume would take an earlier run's newest file for this run's."""
        names = find(prefix) if self._place.rank == 0 else []
        if names:
            log.warning(
                "%s exists from an earlier run, but this run starts from the beginning; use --resume auto to continue "
                "the earlier run, or another --model-prefix to keep the two apart",
                names[0].path,
            )

    @property
    def _device(self) -> torch.device:
        return next(self._trainer.model.parameters()).device


def _check_writable(prefix: str) -> None:
    """Report an unwritable folder at the start, because the first checkpoint may be hours away."""
    folder = Path(prefix).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            f"--model-prefix {prefix}: checkpoints cannot be written in {folder.absolute()}: "
            f"{error.strerror or error}; make it a writable folder, or give another prefix"
        ) from error


def _set_buffers(model: nn.Module, values: Tensors) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in values:
                buffer.copy_(values[name])
