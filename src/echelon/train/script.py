"""What the example scripts share: flags, devices, the log, and one process a device.

    parser = script.make_parser(__doc__)
    parser.set_defaults(network="mlp", num_epochs=20)
    if __name__ == "__main__":
        script.run(parser, data="mnist")

The same command works in every role: started as a server or the scheduler (`DMLC_ROLE`), `run` serves and leaves.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace

from echelon.environment import Job
from echelon.errors import EchelonError
from echelon.train.flags import no_effect as vain
from echelon.train.flags.arguments import (
    Parser,
    add_augment_arguments,
    add_data_arguments,
    add_fit_arguments,
    options_from,
)
from echelon.train.recipe.options import TrainOptions

LOG_FORMAT = "%(levelname)s:root:%(message)s"  # MXNet's lines, which parse_log and people's scripts read


def make_parser(description: str | None, *, images: bool = True) -> Parser:
    """The flags of training; with `images`, those of data and augmentation, too."""
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_fit_arguments(parser, parser.own)
    if images:
        add_data_arguments(parser, parser.own)
        add_augment_arguments(parser, parser.own)
    parser.set_defaults(kv_store="device")
    return parser


def run(parser: argparse.ArgumentParser, data: str, arguments: Sequence[str] | None = None) -> None:
    """Be the process that the command line and the environment describe; does not return."""
    try:
        sys.exit(_run(parser, data, sys.argv[1:] if arguments is None else arguments))
    except EchelonError as error:
        sys.exit(f"{parser.prog}: error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def _run(parser: argparse.ArgumentParser, data: str, arguments: Sequence[str]) -> int:
    job = Job.from_environment()
    if job.role != "worker":
        from echelon.kvstore.create import serve_and_exit

        serve_and_exit(job)
    given = parser.parse_args(arguments)
    options = read_options(given, data)
    check(options, job)
    if len(options.devices) > 1 and job.num_devices == 1:
        from echelon.launch.devices import run_devices

        return run_devices([sys.executable, sys.argv[0], *arguments], len(options.devices))
    from echelon.train.loop.fit import fit  # torch: not before the flags are known to be right
    from echelon.train.loop.progress import TrainingProgress

    with TrainingProgress() as progress:
        logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, handlers=[progress.handler()])
        vain.warn(given)
        return fit(options, job.run_dir, progress)


def read_options(given: argparse.Namespace, data: str) -> TrainOptions:
    """The options of a parsed command line."""
    from echelon.launch.devices import parse_devices

    given.device_list = parse_devices(given.gpus, given.devices)
    network_options = {"add_stn": True} if getattr(given, "add_stn", False) else {}  # a flag of train_mnist.py alone
    return replace(options_from(given), data=data, network_options=network_options)


def check(options: TrainOptions, job: Job) -> None:
    """What is wrong with the flags together is said before anything is started."""
    from echelon import models
    from echelon.data.sets.datasets import check_files, dataset_names, default_augment, open_dataset
    from echelon.schemes.stores import store_kind
    from echelon.suggestions import unknown_name
    from echelon.train.recipe.optimizers import check_on_servers, check_optimizer, warms_up_by_norm
    from echelon.train.recipe.plan import device_batch
    from echelon.train.recipe.schedules import make_schedule

    vain.check_alone(options)
    store_kind(options.kv_store)  # raises for an unknown name
    check_optimizer(options.optimizer)
    by_norm = warms_up_by_norm(options.optimizer, options.warmup_strategy)
    make_schedule(
        lr=options.lr,
        factor=options.lr_factor,
        step_epochs=options.lr_step_epochs,
        kind=options.lr_schedule,
        epoch_size=1,
        num_epochs=options.num_epochs,
        warmup_strategy="linear" if by_norm else options.warmup_strategy,
    )
    device_batch(options.batch_size, len(options.devices))
    if options.data not in dataset_names():
        open_dataset(options.data)  # raises
    data = "synthetic" if options.benchmark else options.data
    check_files(data, options)
    default_augment(data, options.image_shape, **options.augment)
    if ":" not in options.network and options.network not in models.names():
        raise unknown_name(
            "network", options.network, models.names(), "name a network of your own as package.module:function"
        )
    if options.network_options:
        models.check_options(options.network, options.network_options)
    served = options.kv_store.startswith("dist_") and "device" not in options.kv_store and job.num_servers
    if served:
        check_on_servers(options.optimizer, job.num_servers, options.warmup_strategy)
