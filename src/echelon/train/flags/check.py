"""All checks of a run's flags, in one place.

`check_flags` runs every check that needs no data, before anything is started or written; the example scripts and
`echelon train` call it once. `check_with_data` runs the checks that need the open data set; `fit` calls it. The checks
that import torch run last, because importing torch takes seconds.

Echelon's own flags are rejected if they have no effect. MXNet's only cause a warning (`warn_about_effects`), so that
its commands still run unchanged. There is no warning about a script's defaults, only about flags that were given.
"""

from __future__ import annotations

import logging
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from echelon import models
from echelon.cluster.shares import find_groups, read_groups
from echelon.environment import Job
from echelon.errors import UsageError, unknown_name
from echelon.schemes import rules_for
from echelon.schemes.stores import store_kind, stores_with
from echelon.train.recipe.options import ALLOCATORS, DTYPES, ENGINES, LEASES, SHARES_FROM_FILE, TrainOptions
from echelon.train.recipe.plan import ProcessRank, device_batch, schedule_for, shares_for

if TYPE_CHECKING:
    from echelon.data.sets.datasets import Dataset

log = logging.getLogger(__name__)

_COUNT = 2**31 - 1  # more would not fit into 32-bit indices
_LONG = 2**63 - 1
_FINITE = sys.float_info.max
_SMALLEST = sys.float_info.min

# The valid numbers of each flag; NaN is never valid. `AugmentConfig` has the ranges of the augmentation flags; switches
# such as `--benchmark 1` accept any whole number.
RANGES: dict[str, tuple[float, float]] = {
    "batch_size": (1, _COUNT),
    "num_epochs": (1, _COUNT),
    "num_layers": (1, _COUNT),
    "num_classes": (1, _COUNT),
    "num_examples": (1, _LONG),
    "num_val_examples": (1, _LONG),
    "disp_batches": (1, _COUNT),
    "data_nthreads": (1, 1024),
    "eval_every": (0, _COUNT),
    "load_epoch": (0, _COUNT),
    "macrobatch_size": (0, _COUNT),
    "monitor": (0, _COUNT),
    "save_batches": (0, _COUNT),
    "staleness": (0, _COUNT),
    "top_k": (0, _COUNT),
    "seed": (-_LONG, _LONG),
    "lr": (0, _FINITE),
    "lr_factor": (0, _FINITE),
    "mom": (0, 1),
    "wd": (0, _FINITE),
    "clip_gradient": (_SMALLEST, _FINITE),
    "max_grad_norm": (_SMALLEST, _FINITE),
    "warmup_epochs": (0, _FINITE),
    "gc_threshold": (0, _FINITE),
    "label_smoothing": (0, 1),
    "mixup": (0, _FINITE),
    "ema_epochs": (0, 10_000),  # with many more, the weight of one step is lost in rounding
    "target_accuracy": (0, 1),
    "pace": (0, 86_400),
}


def check_flags(
    given: Namespace, options: TrainOptions, job: Job, *, worker_hosts: Mapping[int, str] | None = None
) -> None:
    """Raise UsageError if the flags cannot work; `options` is made from `given`.

    `worker_hosts`: the same command starts the job, with its workers on these hosts, so it is checked, too.
    """
    _check_single_flags(given)
    _check_combinations(options)
    _check_network(options)
    store_kind(options.kv_store)  # raises for an unknown name
    if worker_hosts is not None:
        _check_job(options, job, worker_hosts)
    schedule_for(options, ProcessRank(0, 1), batches_per_epoch=1, begin_epoch=0)  # raises for invalid settings
    device_batch(options.batch_size, len(options.devices))
    _check_data(options)  # imports torch, like all that follows
    _check_optimizer(options, job)
    _check_metrics(options)


def check_with_data(options: TrainOptions, dataset: Dataset) -> None:
    """Raise UsageError for flags that do not suit the data; warn about a random crop without a choice."""
    _check_validation(options, has_validation=dataset.validation is not None)
    _check_metrics(options, dataset.num_classes)
    augment = dataset.augment
    if augment.random_resized_crop and not augment.resizes_at_random:
        log.warning(
            "--random-resized-crop 1 crops the centre, as in MXNet, because all areas and aspect ratios are 1: give, "
            "for example, --min-random-area 0.08 or --max-random-aspect-ratio"
        )


def check_numbers(values: Mapping[str, float | None]) -> None:
    """Raise UsageError for a number out of its flag's range; ignores flags that are missing or None."""
    for name, (low, high) in RANGES.items():
        value = values.get(name)
        if value is not None and not low <= value <= high:
            shown = f"{value:g}" if isinstance(value, float) else value
            raise UsageError(f"--{name.replace('_', '-')} must be {_allowed(low, high, value)}, not {shown}")
    if values.get("top_k") == 1:
        raise UsageError("--top-k 1: give 2 or more, or 0 for none (top-1 is the accuracy, always shown)")


def _check_single_flags(given: Namespace) -> None:
    """Check each value by itself."""
    values = vars(given)
    if values.get("gc_type", "none") != "none":
        raise UsageError(f"--gc-type {given.gc_type}: gradient compression is not implemented yet; use none")
    check_numbers(values)
    prefix = given.model_prefix
    if prefix is not None and (not prefix or prefix.endswith("/")):
        raise UsageError(f"--model-prefix {prefix!r} does not end with a file name; add one, for example {prefix}model")
    _check_choice("--dtype", given.dtype, DTYPES)
    _check_choice("--engine", given.engine, ENGINES)
    if given.data_allocator is not None:
        _check_choice("--data-allocator", str(given.data_allocator), tuple(map(str, ALLOCATORS)))


def _check_choice(flag: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise UsageError(f"{flag} {value!r}: use one of {', '.join(choices)}")


def _check_combinations(options: TrainOptions) -> None:
    """Reject flags that need another flag, or exclude one."""
    pace = options.pace
    if (pace.slow or pace.stall) and not pace.seconds:
        raise UsageError("--slow and --stall multiply the seconds of --pace: give it too, for example --pace 0.05")
    if options.save_batches and not options.model_prefix:
        raise UsageError(f"--save-batches {options.save_batches} needs a file name: give --model-prefix too")
    if (options.resume or options.load_epoch is not None) and not options.model_prefix:
        raise UsageError("to resume from a checkpoint, give its prefix: --model-prefix PREFIX")
    if options.data_sharding != TrainOptions().data_sharding and options.data_allocator != SHARES_FROM_FILE:
        raise UsageError(f"--data-sharding {options.data_sharding} is not read without --data-allocator 1: give both")
    _check_leases(options)
    if options.resume and options.load_epoch is not None:
        raise UsageError(
            f"--load-epoch {options.load_epoch} and --resume auto both choose a checkpoint: give only one of them"
        )


def _check_leases(options: TrainOptions) -> None:
    """Reject leases where nobody hands them out, and batches by speed where steps do not end together."""
    kind = store_kind(options.kv_store)
    if options.data_allocator == LEASES and kind.collective:
        raise UsageError(
            f"--data-allocator 2 needs servers, and --kv-store {options.kv_store} has none: use dist_sync, dist_async, "
            "dist_ssync or dist_gsync, or leave it out"
        )
    if options.batch_by_speed and (kind.collective or not kind.lock_step):
        raise UsageError(
            f"--batch-by-speed has no meaning for --kv-store {options.kv_store}: use dist_sync, whose steps end "
            "together, or leave it out"
        )
    if options.batch_by_speed and options.data_allocator not in (None, LEASES):
        raise UsageError(
            f"--batch-by-speed needs leases, not --data-allocator {options.data_allocator}: give only one of them"
        )


def _check_network(options: TrainOptions) -> None:
    if ":" not in options.network and options.network not in models.names():
        raise unknown_name(
            "network", options.network, models.names(), "name a network of your own as package.module:function"
        )
    if options.network_options:
        models.check_options(options.network, options.network_options)


def _check_job(options: TrainOptions, job: Job, worker_hosts: Mapping[int, str]) -> None:
    """Check the numbers of workers and servers against the store, the groups, the shares and the slow ranks."""
    name, kind, num_workers = options.kv_store, store_kind(options.kv_store), job.num_workers
    if num_workers > 1 and not kind.spans_workers:
        raise UsageError(f"--kv-store {name} is for one worker; with -n {num_workers} use a dist_ store")
    if kind.needs_servers and not job.num_servers:
        raise UsageError(f"--kv-store {name} needs a server, but -s is 0: give -s 1 or more (dist_sync needs none)")
    if (options.data_allocator == LEASES or options.batch_by_speed) and not job.num_servers:
        flag = "--batch-by-speed" if options.batch_by_speed else "--data-allocator 2"
        raise UsageError(f"{flag} needs a server, but -s is 0: give -s 1 or more, or leave it out")
    _check_scheme_flags(options)
    if not kind.collective:
        rules_for(name, options.staleness, _groups(options, worker_hosts), options.lr_scale)
    ranks = [rank for rank in options.pace.slow if rank >= num_workers]
    if ranks:
        raise UsageError(f"--slow names worker {ranks[0]}, but ranks go from 0 to {num_workers - 1}")
    if options.data_allocator == SHARES_FROM_FILE:
        shares_for(options, num_workers)


def _check_scheme_flags(options: TrainOptions) -> None:
    """Reject a bound or groups that the store does not have, and name the stores that have them."""
    kind = store_kind(options.kv_store)
    for setting, value in (("staleness", options.staleness), ("groups", options.groups)):
        if value is not None and kind.name not in (stores := stores_with(setting)):
            raise UsageError(
                f"--{setting} {value} has no meaning for --kv-store {kind.name}; use --kv-store "
                f"{' or '.join(stores)}, or leave it out"
            )


def _groups(options: TrainOptions, worker_hosts: Mapping[int, str]) -> list[list[int]] | None:
    """Return the groups of ranks that the workers will read."""
    given = find_groups(options.groups)
    if given is None or not store_kind(options.kv_store).takes_groups:
        return None
    return read_groups(given, worker_hosts)


def _check_data(options: TrainOptions) -> None:
    from echelon.data.sets.datasets import check_files, dataset_names, default_augment

    if options.data not in dataset_names():
        raise unknown_name("data set", options.data, dataset_names())
    data = "synthetic" if options.benchmark else options.data
    check_files(data, options)
    default_augment(data, options.image_shape, **options.augment)


def _check_optimizer(options: TrainOptions, job: Job) -> None:
    from echelon.train.recipe.optimizers import check_on_servers, check_optimizer

    check_optimizer(options.optimizer, options.optimizer_style, options.clip_gradient, options.weight_decay)
    if job.num_servers and not store_kind(options.kv_store).collective:
        check_on_servers(options.optimizer)


def _check_metrics(options: TrainOptions, num_classes: int | None = None) -> None:
    from echelon.train.step.metrics import Metrics

    metrics = Metrics(others=options.metrics)  # raises for an unknown name
    if num_classes is not None:
        metrics.check_classes(num_classes)


def _check_validation(options: TrainOptions, *, has_validation: bool) -> None:
    given = []
    if options.target_accuracy is not None:
        given.append(f"--target-accuracy {options.target_accuracy:g}")
    if options.eval_every:
        given.append(f"--eval-every {options.eval_every}")
    if options.num_val_examples is not None:
        given.append(f"--num-val-examples {options.num_val_examples}")
    if has_validation or not given:
        return
    need, them = ("need", "them") if len(given) > 1 else ("needs", "it")
    where = "--benchmark 1 has none:" if options.benchmark else f"{options.data} has none here: give --data-val, or"
    raise UsageError(f"{' and '.join(given)} {need} validation data, but {where} leave {them} out")


def _allowed(low: float, high: float, value: float) -> str:
    if low == _SMALLEST:
        return "above 0, and finite"
    if high == _FINITE:
        return f"{low} or more, and finite"
    if high in (_COUNT, _LONG) and low >= 0:
        return f"{low} or more" if value < low else f"{high} or less"
    return f"between {low} and {high}"


def warn_about_effects(given: Namespace) -> None:
    """Log a warning for each flag that was given and has no effect."""
    for line in warnings_about(given):
        log.warning(line)


def warnings_about(given: Namespace) -> list[str]:
    """Return the lines that `warn_about_effects` logs."""
    recorded = getattr(given, "recorded", ())
    reasons = {name: reason_for(given) for name, reason_for in _REASONS.items() if name in recorded}
    return [f"{_flag(given, name)} has no effect: {reason}" for name, reason in reasons.items() if reason]


def _flag(given: Namespace, name: str) -> str:
    value = getattr(given, name)
    return f"--{name.replace('_', '-')} {f'{value:g}' if isinstance(value, float) else value}"


def _steps(given: Namespace) -> str | None:
    kind, steps = given.lr_schedule, given.lr_step_epochs
    if not steps or (kind == "poly" and "pow" in steps):
        return None
    if kind != "step":
        return f"--lr-schedule {kind} has no steps"
    return None if given.lr_factor < 1 else f"--lr-factor {given.lr_factor:g} does not lower the learning rate"


def _rate(given: Namespace) -> str | None:
    is_adadelta = given.optimizer.lower() == "adadelta" and given.optimizer_style == "mxnet"
    return "MXNet's adadelta has no learning rate (torch's has: --optimizer-style torch)" if is_adadelta else None


def _macrobatch(given: Namespace) -> str | None:
    if not given.macrobatch_size:
        return None
    return None if given.optimizer.lower() == "lbsgd" else f"only --optimizer lbsgd uses it, not {given.optimizer}"


def _area(name: str) -> Callable[[Namespace], str | None]:
    def reason_for(given: Namespace) -> str | None:
        resizes = given.random_resized_crop
        has_effect = getattr(given, name) == 1 or (given.use_imagenet_data_augmentation if resizes is None else resizes)
        return None if has_effect else "only --random-resized-crop 1 uses it"

    return reason_for


def _imagenet_augmentation(given: Namespace) -> str | None:
    has_effect = not given.use_imagenet_data_augmentation or hasattr(given, "random_crop")
    return None if has_effect else "this script does not augment its images"


def _profile(name: str) -> Callable[[Namespace], str | None]:
    reason = "Echelon writes no profiles; use torch.profiler in a loop of your own"
    return lambda given: reason if getattr(given, name) else None


def _servers(given: Namespace) -> str | None:
    named = "kv_store" in getattr(given, "recorded", ())
    unused = named and given.num_servers and store_kind(given.kv_store).collective
    return f"{given.kv_store} runs without servers" if unused else None


_REASONS: dict[str, Callable[[Namespace], str | None]] = {
    "num_servers": _servers,
    "lr": _rate,
    "lr_step_epochs": _steps,
    "macrobatch_size": _macrobatch,
    "min_random_area": _area("min_random_area"),
    "max_random_area": _area("max_random_area"),
    "use_imagenet_data_augmentation": _imagenet_augmentation,
    "layer_before_fullc": lambda given: "the last layer is found by its shape",
    "profile_worker_suffix": _profile("profile_worker_suffix"),
    "profile_server_suffix": _profile("profile_server_suffix"),
    "gc_threshold": lambda given: "gradient compression is not implemented yet",
}
