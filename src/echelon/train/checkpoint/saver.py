"""What a run saves, and how it resumes.

The file without a rank holds the weights, the optimizer state and the random number generators. The lowest living rank
writes it, usually rank 0. The other ranks' files hold only what differs between ranks: BatchNorm statistics and random
number generators. A resumed run continues with the same weights to the bit, the same learning rate schedule and the
same order of samples.

With leases (`--data-allocator 2`), the position is the samples of the epoch that are trained, and a run continues with
the others, with any number of workers. With fixed shares, workers of a lock-step store save at the same position. Those
of the other stores are at different places in the data: after a run was stopped, each continues at its own place if the
job has the same layout. Otherwise all of them continue at rank 0's.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from torch import Tensor, nn

from echelon import __version__
from echelon.data.records.class_file import merge_class_names
from echelon.data.sets.datasets import Dataset
from echelon.errors import DataError, UsageError
from echelon.schemes.stores import store_kind
from echelon.train import log_lines
from echelon.train.checkpoint.background import BackgroundWriter
from echelon.train.checkpoint.compatibility import check_network_and_optimizer, check_sample_order, check_shapes
from echelon.train.checkpoint.format import Checkpoint, Metadata, Tensors, load, load_metadata
from echelon.train.checkpoint.mxnet.params import SUFFIX as PARAMS_SUFFIX
from echelon.train.checkpoint.mxnet.recognise import Network
from echelon.train.checkpoint.names import (
    RESULT_FILE,
    CheckpointName,
    ResumeFrom,
    find,
    load_at,
    load_newest,
    path_for,
    prune,
)
from echelon.train.recipe.options import LEASES, TrainOptions
from echelon.train.recipe.plan import ProcessRank, shares_of
from echelon.train.step.average import MovingAverage
from echelon.train.step.precision import LossScaler
from echelon.train.trainer.base import Trainer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunPosition:
    """How far a run is: completed epochs; in the current epoch, this process's steps and all processes' samples.

    `done` are the samples of the current epoch, as intervals of its order, if they were leased.
    """

    epoch: int = 0
    batch: int = 0
    samples_done: int = 0
    done: tuple[tuple[int, int], ...] = ()


class Saver:
    """Writes and reads the checkpoints of one process."""

    def __init__(
        self,
        options: TrainOptions,
        place: ProcessRank,
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
        self._classes = dataset.classes
        num_samples = len(dataset.train)
        num_examples = min(options.num_examples or num_samples, num_samples)  # per epoch
        self._order = {"seed": options.seed, "num_samples": num_samples, "num_examples": num_examples}
        self._scaler = scaler
        self._average = average
        self._shares = shares_of(options, place)
        self._branch = 0  # see `names`
        self._session = 0  # counts how often the run was started
        self._wrote: tuple[RunPosition, bool] | None = None  # where, and whether as the first process
        self._gone: range = range(0)  # ranks of the run before, if it had more processes; their files are deleted
        self._final: list[Path] = []  # the files of the end of the run
        self.writer = BackgroundWriter(self._report_failure)

    def save(self, position: RunPosition, metrics: dict[str, float], *, is_last: bool = False) -> None:
        """Save this process's checkpoint if the run has a prefix; `is_last`: it stops here.

        All processes of a lock-step store call it at the same position. The file is written in the background.
        """
        self._trainer.sync()
        prefix, rank, is_first = self._options.model_prefix, self._place.rank, self._trainer.kvstore.is_first
        if prefix is None or (self._wrote == (position, is_first) and not is_last):
            return  # a cut at the end of an epoch has saved it
        optimizer = self.optimizer_state()
        if rank == 0 and not is_first:
            return  # this worker was removed from the job, and another one writes the file without a rank
        path = path_for(prefix, 0 if is_first else rank, position.epoch, position.samples_done)
        checkpoint = self._checkpoint(position, metrics, optimizer, is_first=is_first)
        self._final = [path] if is_last else []
        self._wrote = (position, is_first)

        def on_saved() -> None:
            prune(prefix, path, sorted({0 if is_first else rank, rank, *(self._gone if is_first else ())}))
            if is_first:
                log.info(log_lines.saved_line(str(path)))

        self.writer.write(path, replace(checkpoint, metadata={**checkpoint.metadata, "is_last": is_last}), on_saved)
        if is_last:
            self.writer.wait()

    def save_if_missing(self, position: RunPosition, metrics: dict[str, float]) -> None:
        """Save the end of a run again if this process has become the first one after it had saved as another rank.

        The process that was the first before may have died before its file was complete.
        """
        if self._wrote == (position, False) and self._trainer.kvstore.is_first:
            self.save(position, metrics, is_last=True)

    def optimizer_state(self) -> Tensors:
        """Return the optimizer's state, on the first living process at least. All processes call it.

        The state may be large, so only the worker that writes it fetches it, unless every process holds a part.
        """
        kvstore, num_devices = self._trainer.kvstore, self._place.num_devices
        is_first_worker = kvstore.workers[:1] == [kvstore.rank - kvstore.rank % num_devices]
        return self._trainer.optimizer_state() if is_first_worker or self._trainer.shards_optimizer else {}

    def save_result(self, directory: str, position: RunPosition, metrics: dict[str, float], optimizer: Tensors) -> Path:
        """Save the final checkpoint in the run directory, as the first process. `optimizer`: see `optimizer_state`."""
        path = Path(directory) / RESULT_FILE
        self._final.append(path)
        self.writer.write(path, self._checkpoint(position, metrics, optimizer, is_first=True))
        return path

    def finish(self) -> str | None:
        """Wait until all files are written. Return why one with the final weights was not, or None if all were."""
        self.writer.wait()
        return next((self.writer.failures[path] for path in self._final if path in self.writer.failures), None)

    def _report_failure(self, path: Path, reason: str) -> None:
        self._trainer.kvstore.events.write("not_saved", file=path.name, reason=reason)

    def load(self) -> RunPosition:
        """Restore the checkpoint that the options name; returns its position, or the start if they name none."""
        prefix = self._options.model_prefix
        if prefix is None:
            return RunPosition()
        position = self._load(prefix)
        _check_writable(prefix)
        return position

    def follow(self) -> RunPosition:
        """Save from now on as the other workers of a running job do, which this one joins; returns no position.

        Its own files, if it becomes the first one, must count as newer than those from before the run.
        """
        prefix = self._options.model_prefix
        if prefix is not None and (names := find(prefix)):
            self._branch = names[0].branch or 0
            with suppress(DataError):  # a damaged file
                self._session = load_metadata(names[0].path).get("session", 0)
        return RunPosition()

    def _checkpoint(
        self, position: RunPosition, metrics: dict[str, float], optimizer: Tensors, *, is_first: bool
    ) -> Checkpoint:
        model = self._trainer.model
        extra = capture_rng(self._device) | (self._scaler.state() if self._scaler else {})
        if self._average is not None and is_first:
            extra |= self._average.state()
        return Checkpoint(
            weights=dict(model.state_dict()) if is_first else dict(model.named_buffers()),
            optimizer=optimizer if is_first else {},
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
            "done": position.done,
            "branch": self._branch,
            "session": self._session,
            "order": self._order,
            "shares": self._shares,
            "num_workers": self._place.num_workers,
            "num_processes": self._place.size,
            "network": options.network,
            "num_classes": self._num_classes,
            "classes": list(self._classes),
            "image_shape": image_shape,
            "num_layers": options.num_layers,
            "network_options": options.network_options,
            "options": asdict(options) | preprocessing,
            "metrics": metrics,
            "version": __version__,
        }

    def _load(self, prefix: str) -> RunPosition:
        options, rank, size = self._options, self._place.rank, self._place.size
        names = find(prefix)
        found: ResumeFrom | None = None
        if options.load_epoch is not None:
            found = load_at(prefix, options.load_epoch, rank=rank, size=size, network=self._network())
        elif options.resume:
            found = load_newest(prefix, rank, size)
        elif names:
            self._warn_about_earlier_run(names[0].path)
        self._branch = _branch_after(names, found)
        if found is None:
            if options.resume:
                log.info("there is no checkpoint %s-* to resume from: training starts from the beginning", prefix)
            return RunPosition()
        metadata, path = found.rank_0.metadata, str(found.path)
        check_network_and_optimizer(metadata, path, options, self._num_classes)
        merge_class_names([(path, tuple(metadata.get("classes", ()))), ("the training data", self._classes)])
        check_sample_order(metadata, path, self._order)
        check_shapes(found.rank_0, path, self._trainer.model.state_dict(), self._augment.shape)
        own = self._own_last(prefix, found) if options.resume else None
        if own is not None:
            found = replace(found, own=own)
        self._restore(found)
        self._gone = range(size, metadata.get("num_processes", size))
        self._session = metadata.get("session", 0) + 1
        log.info(log_lines.loaded_line(path))
        if found.path.suffix == PARAMS_SUFFIX and self._trainer.kvstore.is_first:
            log.info("%s holds only weights, as MXNet saves them: the state of the optimizer starts from zero", path)
        return self._position(metadata if own is None else own.metadata, path)

    def _position(self, metadata: Metadata, path: str) -> RunPosition:
        """Return where this process continues: after a change of the workers' shares, where the epoch began."""
        epoch, batch, samples_done = (metadata[name] for name in ("epoch", "batch", "samples_done"))
        done = tuple((start, stop) for start, stop in metadata.get("done", ()))
        if not samples_done:
            return RunPosition(epoch)
        if self._options.data_allocator == LEASES and (done or metadata.get("shares") is None):
            whole = ((0, min(samples_done, self._order["num_examples"])),)  # equal shares advance together
            return RunPosition(epoch, 0, samples_done, done or whole)
        if done and done != ((0, samples_done),):
            return self._without_gaps(epoch, done, samples_done, path)
        if metadata.get("shares", self._shares) == self._shares:
            return RunPosition(epoch, batch, samples_done)
        self._branch += 1  # the next positions are before this one
        if self._trainer.kvstore.is_first:
            log.warning(
                "%s was saved in the middle of an epoch, when the workers had other shares of the data: epoch %d "
                "starts again, so that no sample is left out",
                path,
                epoch,
            )
        return RunPosition(epoch)

    def _without_gaps(self, epoch: int, done: Sequence[tuple[int, int]], samples_done: int, path: str) -> RunPosition:
        """Return where fixed shares continue after leases: they cannot leave out samples after the first gap."""
        first = next((stop for start, stop in done if start == 0), 0)
        self._branch += 1  # the next positions are before this one
        if self._trainer.kvstore.is_first:
            log.warning(
                "%s was saved with --data-allocator 2: of its %d samples, %d are seen again, because equal shares "
                "cannot leave them out",
                path,
                samples_done,
                samples_done - first,
            )
        return RunPosition(epoch, 0, first)

    def _own_last(self, prefix: str, found: ResumeFrom) -> Checkpoint | None:
        """Return the checkpoint with which this process stopped, if its worker may continue at its own place.

        That needs a store without lock-step, the layout of the run before, and a file from the same stop of each
        device of the worker. All devices of the worker read the same files, so they agree.
        """
        place, metadata = self._place, found.rank_0.metadata
        worker = place.rank // place.num_devices
        if worker == 0 or store_kind(self._trainer.kvstore.type).lock_step:
            return None
        if self._options.data_allocator == LEASES:
            return None
        if not metadata.get("is_last"):
            return None
        here = [place.size, place.num_workers, self._shares, self._options.batch_size]
        there = [metadata[name] for name in ("num_processes", "num_workers", "shares")]
        if [*there, metadata["options"]["batch_size"]] != here:
            return None
        first = worker * place.num_devices
        files = [_newest(prefix, rank) for rank in range(first, first + place.num_devices)]
        if all(file is not None and _same_stop(file.metadata, metadata) for file in files):
            return files[place.rank - first]
        return None

    def _network(self) -> Network:
        """Return the network of this run, which a file of MXNet must fit."""
        options = self._options
        shape = self._augment.shape
        return Network(options.network, self._num_classes, shape, options.num_layers, options.network_options)

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

    def _warn_about_earlier_run(self, newest: Path) -> None:
        if self._trainer.kvstore.is_first:
            log.warning(
                "%s exists from an earlier run, but this run starts from the beginning; use --resume auto to continue "
                "the earlier run, or another --model-prefix to keep the two apart",
                newest,
            )

    @property
    def _device(self) -> torch.device:
        return next(self._trainer.model.parameters()).device


def capture_rng(device: torch.device | str = "cpu") -> Tensors:
    """Return the state of torch's CPU generator and, if `device` is a GPU, of that GPU's generator."""
    states = {"rng.cpu": torch.get_rng_state()}
    if torch.device(device).type == "cuda":
        states["rng.cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_rng(states: Mapping[str, Tensor], device: torch.device | str = "cpu") -> None:
    """Set the generators to what `capture_rng` returned; missing states and those of an unused GPU are ignored."""
    if "rng.cpu" in states:
        torch.set_rng_state(states["rng.cpu"])
    if "rng.cuda" in states and torch.device(device).type == "cuda":
        torch.cuda.set_rng_state(states["rng.cuda"], device)


def _newest(prefix: str, rank: int) -> Checkpoint | None:
    """Load a rank's newest file; None if there is none, or if it is damaged."""
    names = find(prefix, rank)
    try:
        return load(names[0].path) if names else None
    except DataError as error:
        log.warning("skipped a damaged checkpoint: %s", error)
        return None


def _same_stop(one: Metadata, other: Metadata) -> bool:
    return all(one.get(name) == other.get(name) for name in ("branch", "session", "is_last"))


def _branch_after(names: Sequence[CheckpointName], found: ResumeFrom | None) -> int:
    """Return the branch of a run that continues from `found`, where `names` are rank 0's files, newest first.

    A run that does not continue from the newest file starts a new branch. Otherwise its files would count as older than
    those it did not continue from. All processes read the same folder, so they agree without communication.
    """
    if not names:
        return 0
    newest = names[0].branch or 0
    return newest if found is not None and found.path == names[0].path else newest + 1


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
