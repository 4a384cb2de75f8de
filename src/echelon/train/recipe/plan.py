"""The arithmetic of a run: shares of the data, number of batches, where to resume. It only reads data_sharding."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from echelon.cluster.shares import read_shares
from echelon.data.loading.order import ByFraction, ByPart, Sampling, Sharding, State
from echelon.errors import UsageError
from echelon.schemes.stores import store_kind
from echelon.train.recipe.options import EQUAL_SHARES, LEASES, SHARES_FROM_FILE, TrainOptions
from echelon.train.recipe.schedules import Schedule, make_schedule


@dataclass(frozen=True, slots=True)
class LargeBatch:
    """The settings of lbsgd, under MXNet's names. `batch_size` is what a gradient is the mean of."""

    batch_scale: int = 1
    batch_size: int = 1
    updates_per_epoch: float = 32
    warmup_epochs: float = 5
    warmup_strategy: str = "linear"


@dataclass(frozen=True, slots=True)
class ProcessRank:
    """One process of a run: `rank` of `size` processes; each worker consists of `num_devices` processes."""

    rank: int
    size: int
    num_devices: int = 1

    @property
    def num_workers(self) -> int:
        """The number of workers in MXNet's sense: one per machine, with all its devices."""
        return self.size // self.num_devices


def epoch_size(num_examples: int, num_workers: int, batch_size: int) -> int:
    """Return the batches of one worker in an epoch, as MXNet counts them."""
    return max(1, math.ceil(num_examples // num_workers / batch_size))


def worker_batch(options: TrainOptions, num_samples: int, num_workers: int) -> int:
    """Return the worker's batch size, limited to its share of an epoch, so that `--num-examples` scales any run down.

    The result is divisible by the worker's devices, with at least one sample for each.
    """
    num_devices = len(options.devices)
    if num_samples < num_workers * num_devices:
        raise UsageError(
            f"{num_samples} samples are too few for {num_workers * num_devices} devices, because each needs one in "
            "every step; use fewer devices or workers, or more samples (for synthetic data, set --num-examples)"
        )
    examples = min(options.num_examples or num_samples, num_samples) // num_workers
    return min(options.batch_size, max(1, examples // num_devices) * num_devices)


def device_batch(batch_size: int, num_devices: int) -> int:
    """Return the batch size of one device; raises UsageError if the worker's batch cannot be divided equally."""
    part, rest = divmod(batch_size, num_devices)
    if rest or not part:
        lower, upper = part * num_devices, (part + 1) * num_devices
        use = f"{lower} or {upper}" if lower else str(upper)
        raise UsageError(f"--batch-size {batch_size} cannot be divided among {num_devices} devices; use {use}")
    return part


def choose_allocator(
    options: TrainOptions, *, with_servers: bool, num_devices: int, fixed_batches: bool, synthetic: bool
) -> int:
    """Return how the data is divided: as the options say, or in leases where these are possible.

    `fixed_batches`: steps are captured or compiled for one batch size. Raises UsageError for leases that are not
    possible.
    """
    obstacle = None
    if not with_servers:
        obstacle = "needs servers, and this job has none: give -s 1 or more"
    elif num_devices > 1:
        obstacle = f"needs workers of one device, and these have {num_devices}: give each device a worker (-n)"
    elif fixed_batches:
        obstacle = "needs steps of any size, which captured and compiled steps are not: give --engine eager"
    elif synthetic:
        obstacle = "needs samples, and --benchmark 1 has none: leave one of them out"
    wanted = LEASES if options.batch_by_speed else options.data_allocator
    if wanted is None:
        return EQUAL_SHARES if obstacle else LEASES
    if wanted == LEASES and obstacle:
        raise UsageError(f"{'--batch-by-speed' if options.batch_by_speed else '--data-allocator 2'} {obstacle}")
    return wanted


def sampling_for(options: TrainOptions, num_samples: int, place: ProcessRank, *, fixed: bool) -> Sampling:
    """Return which samples this process trains on. `fixed`: all processes run the same number of full-size steps.

    Lock-step collectives and captured steps need that. Otherwise the last batch may be smaller, and each worker reads
    its own share once per epoch.
    """
    shorter = options.num_examples is not None and options.num_examples < num_samples
    batches = None
    if fixed or shorter:
        examples = min(options.num_examples or num_samples, num_samples)
        batches = epoch_size(examples, place.num_workers, options.batch_size)
    elif place.num_devices > 1:
        batches = _largest_share(options, num_samples, place)
    return Sampling(
        num_samples,
        device_batch(options.batch_size, place.num_devices),
        seed=options.seed,
        sharding=sharding_for(options, place),
        num_batches=batches,
    )


def _largest_share(options: TrainOptions, num_samples: int, place: ProcessRank) -> int:
    """Return the most batches that a device of this worker needs to read its share once.

    The devices of a worker synchronize in every step, so they must run equally many steps, but their shares may differ
    by one sample and therefore by one batch.
    """
    size = device_batch(options.batch_size, place.num_devices)
    first = place.rank - place.rank % place.num_devices
    devices = [replace(place, rank=first + index) for index in range(place.num_devices)]
    parts = [Sampling(num_samples, size, sharding=sharding_for(options, device)) for device in devices]
    return max(part.batches_per_epoch for part in parts)


def sharding_for(options: TrainOptions, place: ProcessRank) -> Sharding:
    """Return this process's share of the data: from its worker's line in data_sharding, or an equal share."""
    if options.data_allocator != SHARES_FROM_FILE:
        return ByPart(place.rank, place.size)
    worker, device = divmod(place.rank, place.num_devices)
    start, end = shares_for(options, place.num_workers)[worker]
    step = (end - start) / place.num_devices
    last = device == place.num_devices - 1
    return ByFraction(start + device * step, end if last else start + (device + 1) * step)


def shares_of(options: TrainOptions, place: ProcessRank) -> list[list[float]] | None:
    """Return the share of the data [start, end] of every process, or None if all are equal."""
    if options.data_allocator != SHARES_FROM_FILE:
        return None
    shards = [sharding_for(options, replace(place, rank=rank)) for rank in range(place.size)]
    return [[shard.start, shard.end] for shard in shards if isinstance(shard, ByFraction)]


def shares_for(options: TrainOptions, num_workers: int) -> list[tuple[float, float]]:
    """Return every worker's share of the data, from the data_sharding file or its text."""
    return read_shares(options.data_sharding, num_workers)


def state_at(sampling: Sampling, epoch: int, samples_done: int, size: int) -> State:
    """Return where a process resumes after all processes together have trained on `samples_done` samples of an epoch.

    The position is rounded down to whole steps, equally for all processes: if their number has changed, a few samples
    are repeated, and none is skipped.
    """
    steps = min(samples_done // (sampling.batch_size * size), sampling.batches_per_epoch)
    if steps == sampling.batches_per_epoch:
        return State(epoch + 1, 0)
    return State(epoch, steps * sampling.batch_size)


def resume_line(epoch: int, samples_done: int, state: State, size: int) -> str | None:
    """Return where a run that was stopped in the middle of an epoch continues, and which samples are seen again."""
    if not samples_done:
        return None
    if state.epoch > epoch:
        ended = f"epoch {epoch} has no further step of this size after {samples_done} samples"
        return f"resuming with epoch {state.epoch}: {ended}"
    samples = state.position * size
    again = samples_done - samples
    why = f"; {again} samples are seen again, because steps have another size now" if again else ""
    return f"resuming epoch {epoch} after {samples} samples{why}"


def schedule_for(options: TrainOptions, place: ProcessRank, batches_per_epoch: int, begin_epoch: int) -> Schedule:
    """Return the learning rate schedule of a process. lbsgd does its own warm-up; lars is one of its strategies."""
    is_lbsgd = options.optimizer.lower() == "lbsgd"
    by_norm = is_lbsgd and options.warmup_strategy == "lars"
    return make_schedule(
        lr=options.lr,
        factor=options.lr_factor,
        step_epochs=options.lr_step_epochs,
        kind=options.lr_schedule,
        epoch_size=batches_per_epoch,
        num_epochs=options.num_epochs,
        begin_epoch=begin_epoch,
        warmup_epochs=0.0 if is_lbsgd else options.warmup_epochs or 0.0,
        warmup_strategy="linear" if by_norm else options.warmup_strategy,
    )


def large_batch_for(options: TrainOptions, num_samples: int, num_workers: int) -> LargeBatch:
    """Return lbsgd's settings, by MXNet's arithmetic: a macrobatch is a whole number of batches of all workers."""
    total = options.batch_size * num_workers
    in_lock_step = store_kind(options.kv_store).lock_step
    return LargeBatch(
        batch_scale=math.ceil(max(options.macrobatch_size, total) / total),
        batch_size=total if in_lock_step else options.batch_size,
        updates_per_epoch=max(1.0, min(options.num_examples or num_samples, num_samples) / total),
        warmup_epochs=5.0 if options.warmup_epochs is None else options.warmup_epochs,
        warmup_strategy=options.warmup_strategy,
    )
