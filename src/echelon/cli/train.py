"""`echelon train`: train on several workers of this machine, with a live display and a run directory."""

from __future__ import annotations

import argparse
import logging
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from echelon.cli.launch import add_job_arguments, job_from, launcher_of, request_from, warn_if_no_restarts
from echelon.cli.live_page import listener_from, live_page
from echelon.dash.serve import Listener
from echelon.environment import Job
from echelon.errors import EchelonError
from echelon.launch import Launcher
from echelon.launch.interface import Output
from echelon.launch.plan import Request
from echelon.launch.run import protect
from echelon.report.runs import discard_run, latest_run, new_run
from echelon.report.state.job import job_title
from echelon.report.state.run import JobInfo, RunState
from echelon.report.summary import summary, write_summary
from echelon.report.terminal.display import Display, stdout_console
from echelon.report.terminal.result import result_lines
from echelon.schemes.stores import store_kind
from echelon.train.flags.arguments import add_arguments, options_from
from echelon.train.flags.check import check_flags, warn_about_effects
from echelon.train.flags.parser import Parser, was_given
from echelon.train.flags.stores import choose_store
from echelon.train.recipe.options import TrainOptions
from echelon.train.script import LOG_FORMAT

DEMO_WORKERS, DEMO_STORE = 4, "dist_gsync"


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add `train`."""
    add_flags(subparsers.add_parser("train", help="train a model on several workers", description=__doc__))


def add_flags(parser: Parser) -> None:
    """Add the flags of `train`."""
    add_job_arguments(parser, default_workers=1)
    parser.add_argument(
        "--demo",
        action="store_true",
        help=f"run the demonstration: {' '.join(demo_words(DEMO_WORKERS, DEMO_STORE))}; other flags change it",
    )
    parser.add_argument("--name", help="name of the run (default: its start time and store)")
    parser.add_argument("--data", default="digits", help="digits, mnist, fashion-mnist, cifar10, imagenet, folder, …")
    add_arguments(parser)
    parser.set_defaults(run=run)


def demo_words(num_workers: int, store: str) -> list[str]:
    """Return the flags of the demonstration: the last worker is three times slower and, under GSP, a group alone."""
    last = num_workers - 1
    groups = "/".join(filter(None, [",".join(map(str, range(last))), str(last)]))
    words = f"-n {num_workers} -s 2 --kv-store {store} --pace 0.02 --slow {last}:3 --num-epochs 16".split()
    return [*words, "--groups", groups] if store_kind(store).takes_groups else words


def as_demo(given: argparse.Namespace) -> argparse.Namespace:
    """Return the flags of the demonstration, changed by those that were given."""
    parser = Parser()
    add_flags(parser)
    num_workers = given.num_workers if was_given(given, "num_workers") else DEMO_WORKERS
    store = given.kv_store if was_given(given, "kv_store") else DEMO_STORE
    demo = parser.parse_args(demo_words(max(1, num_workers), store))
    chosen = {name: getattr(demo, name) for name in demo.recorded if not was_given(given, name)}
    return argparse.Namespace(**{**vars(given), **chosen, "recorded": {*getattr(given, "recorded", ()), *chosen}})


def run(given: argparse.Namespace) -> int:
    """Run the job under a display, and write its summary and curves; returns the exit status."""
    if given.demo:
        given = as_demo(given)
    options, job = options_from(given, given.data), job_from(given)
    store, reason = choose_store(
        options.kv_store,
        named=was_given(given, "kv_store"),
        num_workers=job.num_workers,
        wants_servers=bool(given.num_servers),
    )
    options = replace(options, kv_store=store)
    if store_kind(options.kv_store).collective:
        job = replace(job, num_servers=0)
    launcher = launcher_of(given.launcher)
    warn_if_no_restarts(given, launcher)
    command = [sys.executable, "-m", "echelon.train", msgspec.json.encode(options).decode()]
    request = request_from(given, job, command)
    plan = launcher.plan(request)
    if given.dry_run:
        print(launcher.describe(plan))
        return 0
    with Console().status("checking the flags and the data…"):  # imports torch, which takes seconds
        check_flags(given, options, job, worker_hosts=plan.worker_hosts())
    warn_about_effects(given)
    if reason:
        print(f"echelon: {reason}", file=sys.stderr, flush=True)
    if options.test_io:
        return _read_only(options)
    return _train(launcher, request, options, given.name, listener_from(given.dash))


def _read_only(options: TrainOptions) -> int:
    from echelon.train.loop.fit import fit  # imports torch, which takes seconds: only after the flags are checked

    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stdout)
    return fit(options)


def _train(
    launcher: Launcher, request: Request, options: TrainOptions, name: str | None, listener: Listener | None
) -> int:
    before, directory = latest_run(), new_run(name, options.kv_store)
    with live_page(listener, directory):
        return _train_in(directory, before, launcher, request, options)


def _train_in(directory: Path, before: str | None, launcher: Launcher, request: Request, options: TrainOptions) -> int:
    request = replace(request, job=replace(request.job, run_dir=str(directory)), shared_folder=str(directory))
    status, state = watch(launcher, request, options, directory)
    if status and not state.has_trained:  # there is nothing but the error, which has been printed
        discard_run(directory, before)
        return status
    result = summary(state, options.kv_store, asdict(options), status)
    error = _write_result(directory, result)
    print_result(result, directory)
    if error is None:
        return status
    print(f"echelon: {error}", file=sys.stderr)
    return status or 1


def _write_result(directory: Path, result: dict[str, Any]) -> str | None:
    """Write the summary and the curves of a run; returns what could not be written, for example to a full disk."""
    from echelon.report.plots.curves import draw_curves  # imports matplotlib, which takes as long as all other imports

    try:
        write_summary(directory, result)
        draw_curves(result, directory / "curves.png")
    except EchelonError as error:
        return str(error)
    except OSError as error:
        return f"the summary and the curves of the run cannot be written to {directory}: {error.strerror or error}"
    return None


def watch(launcher: Launcher, request: Request, options: TrainOptions, directory: Path) -> tuple[int, RunState]:
    """Run the workers under a display; returns the exit status and what the run reported."""
    with Display(directory, job_info(options, request.job)) as display:
        status = launcher.run(protect(launcher.plan(request)), Output(display.print, display.update, shown=True))
    return status, display.state


def job_info(options: TrainOptions, job: Job) -> JobInfo:
    """Return what the display says about a job."""
    return JobInfo(
        job_title(asdict(options), job.num_workers, job.num_servers),
        job.num_workers,
        job.num_servers,
        lock_step=store_kind(options.kv_store).lock_step,
        bounded=options.staleness is not None,
    )


def print_result(result: dict[str, Any], directory: Path) -> None:
    """Print the result of a run and its directory."""
    console = stdout_console()
    block = "█" if console.encoding.startswith("utf") else "#"
    print("\n".join(result_lines(result, str(directory), console.width, block)))
