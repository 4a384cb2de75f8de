"""When a run saves and how it goes on from what it saved.

Rank 0's file has weights, optimizer state and random numbers; the other ranks' files only what is theirs alone
(BatchNorm's statistics, random numbers). What goes on: the weights to the bit, the schedule, the order of the data.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from torch import Tensor, nn

from echelon import __version__
from echelon.data.sets.datasets import Dataset
from echelon.errors import UsageError
from echelon.train import log_lines
from echelon.train.checkpoint.names import (
    Found,
    Snapshot,
    capture_rng,
    find,
    load_common,
    load_point,
    path_for,
    prune,
    restore_rng,
    save,
)
from echelon.train.recipe.options import TrainOptions
from echelon.train.recipe.plan import Place
from echelon.train.step.average import MovingAverage
from echelon.train.step.precision import LossScaler
from echelon.train.trainer.base import Trainer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Point:
    """A place in a run: epochs done, steps of this process and samples of all processes in the epoch under way."""

    epoch: int = 0
    batch: int = 0
    samples_done: int = 0


class Saver:
    """Writes and reads the snapshots of one process. Without a prefix it does neither."""

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
        num_examples = min(options.num_examples or num_samples, num_samples)  # of an epoch
        self._order = {"seed": options.seed, "num_samples": num_samples, "num_examples": num_examples}
        self._scaler = scaler
        self._average = average
        self._prefix = options.model_prefix
        if self._prefix is None and (options.resume or options.load_epoch is not None):
            raise UsageError("to go on from a checkpoint, name its prefix: --model-prefix PREFIX")

    def save(self, point: Point, metrics: dict[str, float]) -> str | None:
        """Save this process's part of the run; all processes call it at the same point. Returns the file."""
        self._trainer.sync()
        if self._prefix is None:
            return None
        optimizer = self._trainer.optimizer_state()  # all processes: parts of it may be everywhere
        model, rank = self._trainer.model, self._place.rank
        path = path_for(self._prefix, rank, point.epoch, point.batch or None)
        extra = capture_rng(self._device) | (self._scaler.state() if self._scaler else {})
        if self._average is not None and rank == 0:
            extra |= self._average.state()
        save(
            path,
            Snapshot(
                weights=dict(model.state_dict()) if rank == 0 else dict(model.named_buffers()),
                optimizer=optimizer if rank == 0 else {},
                extra=extra,
                facts=self._facts(point, metrics),
            ),
        )
        prune(self._prefix, rank=rank)
        if rank == 0:
            log.info(log_lines.saved_line(str(path)))
        return str(path)

    def load(self) -> Point:
        """Go on from the snapshot that the options name; the beginning, if they name none."""
        if self._prefix is None:
            return Point()
        point = self._load(self._prefix)
        _check_writable(self._prefix)
        return point

    def _load(self, prefix: str) -> Point:
        rank, size = self._place.rank, self._place.size
        found: Found | None
        if self._options.load_epoch is not None:
            found = load_point(prefix, rank, size, self._options.load_epoch)
        elif self._options.resume:
            found = load_common(prefix, rank, size)
        else:
            self._warn_of_earlier(prefix)
            return Point()
        if found is None:
            log.info("no checkpoint %s-* to go on from: training begins at the beginning", prefix)
            return Point()
        self._check(found.first.facts, str(found.path))
        self._check_order(found.first.facts, str(found.path))
        self._check_fit(found.first, str(found.path))
        self._apply(found)
        facts = found.first.facts
        log.info(log_lines.loaded_line(prefix, facts["epoch"]))
        return Point(facts["epoch"], facts["batch"], facts["samples_done"])

    def _warn_of_earlier(self, prefix: str) -> None:
        """A later --resume would take an earlier run's newest file for this one's."""
        names = find(prefix) if self._place.rank == 0 else []
        if names:
            log.warning(
                "%s is there from an earlier run, and this one begins at the beginning; --resume auto goes on from it, "
                "and another --model-prefix keeps the two apart",
                names[0].path,
            )

    @property
    def _device(self) -> torch.device:
        return next(self._trainer.model.parameters()).device

    def _apply(self, found: Found) -> None:
        first, own = found.first, found.own
        self._trainer.load_weights(first.weights)
        if first.optimizer:
            self._trainer.load_optimizer_state(first.optimizer)
        if own is not first:
            _set_buffers(self._trainer.model, own.weights)
        restore_rng(own.extra, self._device)
        if self._scaler is not None:
            self._scaler.load(dict(own.extra))
        if self._average is not None:
            self._average.load(dict(first.extra))

    def _facts(self, point: Point, metrics: dict[str, float]) -> dict[str, Any]:
        options = self._options
        return {
            "epoch": point.epoch,
            "batch": point.batch,
            "samples_done": point.samples_done,
            "order": self._order,
            "num_workers": self._place.num_workers,
            "num_processes": self._place.size,
            "network": options.network,
            "num_classes": self._num_classes,
            "image_shape": list(self._augment.shape),
            "num_layers": options.num_layers,
            "network_options": options.network_options,
            "options": asdict(options)
            | {
                "image_shape": list(self._augment.shape),
                "rgb_mean": list(self._augment.rgb_mean),
                "rgb_std": list(self._augment.rgb_std),
            },
            "metrics": metrics,
            "version": __version__,
        }

    def _check(self, facts: dict[str, Any], path: str) -> None:
        """A file of another network or optimizer is refused with both values."""
        options = self._options
        wanted = {
            "network": options.network,
            "num_layers": options.num_layers,
            "num_classes": self._num_classes,
            "network options": _listed(options.network_options),
            "optimizer": options.optimizer.lower(),
        }
        saved = {name: facts.get(name) for name in wanted} | {
            "network options": _listed(facts.get("network_options", options.network_options)),
            "optimizer": facts.get("options", {}).get("optimizer", options.optimizer).lower(),
        }
        if pairs := _differences(saved, wanted):
            raise UsageError(f"{path} is of another run: {pairs}. Give the same flags, or another prefix")

    def _check_order(self, facts: dict[str, Any], path: str) -> None:
        """A place in the middle of an epoch means nothing in another order. Older files do not say theirs."""
        if facts["samples_done"] and (pairs := _differences(facts.get("order", self._order), self._order)):
            raise UsageError(
                f"{path} is of the middle of an epoch, and its place is in another order of samples: {pairs}. Give the "
                "same flags and data, go on from the end of an epoch (--load-epoch), or give another prefix"
            )

    def _check_fit(self, snapshot: Snapshot, path: str) -> None:
        """Another image shape will do if no weight depends on it; what does not fit is named."""
        there, here = (_shapes(named) for named in (snapshot.weights, self._trainer.model.state_dict()))
        if there == here:
            return
        name = next(name for name in (*here, *there) if here.get(name) != there.get(name))
        images = " there, ".join(
            ",".join(map(str, shape)) for shape in (snapshot.facts.get("image_shape", "?"), self._augment.shape)
        )
        raise UsageError(
            f"{path} does not fit the network: weight {name} is {there.get(name, 'missing')} there, "
            f"{here.get(name, 'missing')} here; images are {images} here. Give the same flags, or another prefix"
        )


def _differences(there: Mapping[str, object], here: Mapping[str, object]) -> str:
    return "; ".join(f"{name} {there[name]} there, {here[name]} here" for name in here if there[name] != here[name])


def _listed(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items()) or "none"


def _shapes(named: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in named.items()}


def _check_writable(prefix: str) -> None:
    """Said at the beginning: the first checkpoint may be hours away."""
    folder = Path(prefix).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            f"--model-prefix {prefix}: no checkpoint can be written in {folder.absolute()}: "
            f"{error.strerror or error}; make it a folder to write in, or name another"
        ) from error


def _set_buffers(model: nn.Module, values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in values:
                buffer.copy_(values[name])
