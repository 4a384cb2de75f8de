"""The arithmetic of a run: whose part of the data, how many batches, where to go on. Pure but for one file."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from echelon.cluster.shares import parse_shares, read_text
from echelon.data.loading.order import Sampling, State
from echelon.data.loading.sharding import ByFraction, ByPart, Sharding
from echelon.errors import UsageError
from echelon.train.recipe.optimizers import warms_up_by_norm
from echelon.train.recipe.options import TrainOptions
from echelon.train.recipe.schedules import Schedule, make_schedule


@dataclass(frozen=True, slots=True)
class Place:
    """One process of a run: `rank` of `size` processes, `num_devices` of which make a worker."""

    rank: int
    size: int
    num_devices: int = 1

    @property
    def num_workers(self) -> int:
        """Workers in MXNet's sense: a machine with all its devices."""
        return self.size // self.num_devices


def epoch_size(num_examples: int, num_workers: int, batch_size: int) -> int:
    """MXNet's batches of one worker in an epoch."""
    return max(1, math.ceil(num_examples // num_workers / batch_size))


def worker_batch(options: TrainOptions, num_samples: int, num_workers: int) -> int:
    """The worker's batch: not more than its part of an epoch has, so that `--num-examples` scales any command down.

    It stays one that its devices can divide, with a sample for each of them at least.
    """
    num_devices = len(options.devices)
    if num_samples < num_workers * num_devices:
        raise UsageError(
            f"{num_samples} samples are too few for {num_workers * num_devices} devices, each of which needs one in "
            "every step; use fewer devices or workers, or more samples (synthetic data has --num-examples of them)"
        )
    examples = min(options.num_examples or num_samples, num_samples) // num_workers
    return min(options.batch_size, max(1, examples // num_devices) * num_devices)


def device_batch(batch_size: int, num_devices: int) -> int:
    """A device's part of the worker's batch."""
    part, rest = divmod(batch_size, num_devices)
    if rest or not part:
        lower, upper = part * num_devices, (part + 1) * num_devices
        use = f"{lower} or {upper}" if lower else str(upper)
        raise UsageError(f"--batch-size {batch_size} cannot be divided among {num_devices} devices; use {use}")
    return part


def sampling_for(options: TrainOptions, num_samples: int, place: Place, *, fixed: bool) -> Sampling:
    """This process's samples. `fixed`: every process makes the same number of steps, all of the full batch.

    Lock-step collectives need that, and so does a captured step. Otherwise a last batch may be smaller, and each worker
    goes once through its own part.
    """
    shorter = options.num_examples is not None and options.num_examples < num_samples
    batches = None
    if fixed or shorter:
        examples = min(options.num_examples or num_samples, num_samples)
        batches = epoch_size(examples, place.num_workers, options.batch_size)
    elif place.num_devices > 1:
        batches = _longest(options, num_samples, place)
    return Sampling(
        num_samples,
        device_batch(options.batch_size, place.num_devices),
        seed=options.seed,
        sharding=sharding_for(options, place),
        num_batches=batches,
    )


def _longest(options: TrainOptions, num_samples: int, place: Place) -> int:
    """Batches of an epoch when a worker goes once through its part: its devices, who meet in every step, make as many.

    Their parts may differ by a sample, and that by a batch.
    """
    size = device_batch(options.batch_size, place.num_devices)
    first = place.rank - place.rank % place.num_devices
    devices = [replace(place, rank=first + index) for index in range(place.num_devices)]
    parts = [Sampling(num_samples, size, sharding=sharding_for(options, device)) for device in devices]
    return max(part.batches_per_epoch for part in parts)


def sharding_for(options: TrainOptions, place: Place) -> Sharding:
    """This process's part of the data: by its worker's line of data_sharding, or an equal one."""
    if not options.data_allocator:
        return ByPart(place.rank, place.size)
    worker, device = divmod(place.rank, place.num_devices)
    start, end = shares_for(options, place.num_workers)[worker]
    step = (end - start) / place.num_devices
    last = device == place.num_devices - 1
    return ByFraction(start + device * step, end if last else start + (device + 1) * step)


def shares_for(options: TrainOptions, num_workers: int) -> list[tuple[float, float]]:
    """Every worker's share of the data, from the file."""
    path = Path(options.data_sharding)
    if not path.is_file():
        raise UsageError(f"--data-allocator 1 needs the file {path}; write a line 'start end' for every worker")
    return parse_shares(read_text(path), num_workers, str(path))


def state_at(sampling: Sampling, epoch: int, samples_done: int, size: int) -> State:
    """Where a process begins when all together had done `samples_done` samples of an epoch.

    Rounded down to whole steps, the same for all: with another number of processes a few samples are seen again, none
    is left out.
    """
    steps = min(samples_done // (sampling.batch_size * size), sampling.batches_per_epoch)
    if steps == sampling.batches_per_epoch:
        return State(epoch + 1, 0)
    return State(epoch, steps * sampling.batch_size)


def schedule_for(options: TrainOptions, place: Place, batches_per_epoch: int, begin_epoch: int) -> Schedule:
    """The learning rate of every step of a process. lbsgd warms up to the rate of its macrobatch."""
    scale = 1.0
    by_norm = warms_up_by_norm(options.optimizer, options.warmup_strategy)
    if options.optimizer.lower() == "lbsgd" and not by_norm:
        total = options.batch_size * place.num_workers
        scale = max(1.0, math.ceil(max(options.macrobatch_size, total) / total))
    warmup = options.warmup_epochs if options.warmup_epochs is not None else 5.0 if scale > 1 else 0.0
    return make_schedule(
        lr=options.lr,
        factor=options.lr_factor,
        step_epochs=options.lr_step_epochs,
        kind=options.lr_schedule,
        epoch_size=batches_per_epoch,
        num_epochs=options.num_epochs,
        begin_epoch=begin_epoch,
        warmup_epochs=0.0 if by_norm else warmup,
        warmup_strategy="linear" if by_norm else options.warmup_strategy,
        warmup_scale=scale,
    )
