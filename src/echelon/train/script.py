"""What the example scripts share: flags, devices, logging, and one process per device.

    parser = script.make_parser(__doc__)
    parser.set_defaults(network="mlp", num_epochs=20)
    if __name__ == "__main__":
        script.run(parser, data="mnist")

The same command works in every role: in a process whose `DMLC_ROLE` is server or scheduler, `run` serves and exits.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NoReturn

from echelon.environment import Job, let_threads_sleep
from echelon.errors import EchelonError
from echelon.train.flags.arguments import add_arguments, options_from
from echelon.train.flags.check import check_flags, warn_about_effects
from echelon.train.flags.parser import Parser, was_given
from echelon.train.flags.stores import choose_store

LOG_FORMAT = "%(levelname)s:root:%(message)s"  # MXNet's format, which parse_log and users' scripts read


def make_parser(description: str | None, *, images: bool = True) -> Parser:
    """Make a parser with the flags of training and, with `images`, those of data and augmentation."""
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
    try:
        status = main()
    except EchelonError as error:
        status = f"{prefix}error: {error}"
    except KeyboardInterrupt:
        print(f"{prefix}stopped by SIGINT", file=sys.stderr)
        status = 130
    if status:  # a store that is still open at exit must not wait for a job that has failed
        sys.last_value = SystemExit(status)
    sys.exit(status)


def _run(parser: argparse.ArgumentParser, data: str, arguments: Sequence[str]) -> int:
    let_threads_sleep()  # before torch is imported
    job = Job.from_environment()
    if job.role != "worker":
        from echelon.kvstore.create import serve_and_exit

        serve_and_exit(job)
    given = parser.parse_args(arguments)
    options = options_from(given, data)
    if hasattr(given, "pretrained_model"):
        from echelon.train.pretrained import options_for_pretrained  # imports torch

        options = options_for_pretrained(options, given)
    store, reason = choose_store(
        options.kv_store, named=was_given(given, "kv_store"), num_workers=job.num_workers if job.distributed else 1
    )
    options = replace(options, kv_store=store)
    check_flags(given, options, job)
    if len(options.devices) > 1 and job.num_devices == 1:
        from echelon.launch.devices import run_devices

        return run_devices([sys.executable, sys.argv[0], *arguments], len(options.devices))
    from echelon.train.loop.fit import fit  # imports torch, which takes seconds: only after the flags are checked
    from echelon.train.loop.reporting import TrainingProgress

    with TrainingProgress() as progress:
        logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, handlers=[progress.handler()])
        warn_about_effects(given)
        if reason and job.rank in (0, None):
            logging.info(reason)
        return fit(options, job.run_dir, progress, owns_process=True)
