"""What the example scripts share: flags, devices, logging, and one process per device.

    parser = script.make_parser(__doc__)
    parser.set_defaults(network="mlp", num_epochs=20)
    if __name__ == "__main__":
        script.run(parser, data="mnist")

The imports that take time are inside functions: Ctrl-C while they run ends the script with a line, not a traceback.
The same command works in every role: in a process whose `DMLC_ROLE` is server or scheduler, `run` serves and exits.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from echelon.environment import Job, let_threads_sleep
from echelon.errors import EchelonError
from echelon.system import exit_on_interrupt

if TYPE_CHECKING:
    from echelon.train.flags.parser import Parser
    from echelon.train.recipe.options import TrainOptions

LOG_FORMAT = "%(levelname)s:root:%(message)s"  # MXNet's format, which parse_log and users' scripts read


def make_parser(description: str | None, *, images: bool = True) -> Parser:
    """Make a parser with the flags of training and, with `images`, those of data and augmentation."""
    with exit_on_interrupt():
        from echelon.train.flags.arguments import add_arguments
        from echelon.train.flags.parser import Parser

        parser = Parser(description=description)
        add_arguments(parser, images=images)
        parser.set_defaults(kv_store="device", optimizer_style="mxnet")
        return parser


def run(parser: argparse.ArgumentParser, data: str, arguments: Sequence[str] | None = None) -> None:
    """Run the process that the command line and the environment describe; does not return."""
    run_process(lambda: _run(parser, data, sys.argv[1:] if arguments is None else arguments), f"{parser.prog}: ")


def run_process(main: Callable[[], int], prefix: str = "") -> NoReturn:
    """Exit with the status that `main` returns. An error of Echelon and Ctrl-C become one line and a status."""
    status: int | str
    cause: EchelonError | None = None
    try:
        status = main()
    except EchelonError as error:
        status, cause = f"{prefix}error: {error}", error
    except KeyboardInterrupt:
        print(f"{prefix}stopped by SIGINT", file=sys.stderr)
        status = 130
    if status:  # a store that is still open at exit must not wait for a job that has failed
        sys.last_value = SystemExit(status)
        sys.last_value.__cause__ = cause
    sys.exit(status)


def _run(parser: argparse.ArgumentParser, data: str, arguments: Sequence[str]) -> int:
    let_threads_sleep()  # before torch is imported
    job = Job.from_environment()
    if job.role != "worker":
        from echelon.kvstore.create import serve_and_exit

        serve_and_exit(job)
    given = parser.parse_args(arguments)
    with exit_on_interrupt():
        options, reason = _checked_options(given, data, job)
        if len(options.devices) == 1 or job.num_devices > 1:
            importlib.import_module("echelon.train.loop.fit")  # imports torch, which takes seconds
    if len(options.devices) > 1 and job.num_devices == 1:
        from echelon.launch.devices import run_devices

        return run_devices([sys.executable, sys.argv[0], *arguments], len(options.devices))
    return _fit(given, options, job, reason)


def _checked_options(given: argparse.Namespace, data: str, job: Job) -> tuple[TrainOptions, str]:
    """Return the options of the run, and the reason if its store is not the script's default."""
    from echelon.train.flags.arguments import options_from
    from echelon.train.flags.check import check_flags
    from echelon.train.flags.parser import was_given
    from echelon.train.flags.stores import choose_store

    options = options_from(given, data)
    if job.data_sharding and not was_given(given, "data_sharding"):
        options = replace(options, data_sharding=job.data_sharding)
    if hasattr(given, "pretrained_model"):
        from echelon.train.pretrained import options_for_pretrained  # imports torch

        options = options_for_pretrained(options, given)
    num_workers = job.num_workers if job.distributed else 1
    store, reason = choose_store(options.kv_store, named=was_given(given, "kv_store"), num_workers=num_workers)
    options = replace(options, kv_store=store)
    check_flags(given, options, job)
    return options, reason


def _fit(given: argparse.Namespace, options: TrainOptions, job: Job, reason: str) -> int:
    from echelon.train.flags.check import warn_about_effects
    from echelon.train.loop.fit import fit
    from echelon.train.loop.reports.reporting import TrainingProgress

    with TrainingProgress() as progress:
        logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, handlers=[progress.handler()])
        warn_about_effects(given)
        if reason and job.rank in (0, None):
            logging.info(reason)
        return fit(options, job.run_dir, progress, owns_process=True)
