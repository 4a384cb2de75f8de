"""`echelon train`: the built-in trainer on many workers of this machine, with a live display and a run directory."""

from __future__ import annotations

import argparse
import logging
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

from echelon.cli.launch import add_job_arguments, job_from
from echelon.cluster.shares import find_groups, read_groups
from echelon.environment import Job
from echelon.errors import UsageError
from echelon.launch import local
from echelon.launch.supervise import OnLine
from echelon.report.curves import draw_curves
from echelon.report.display import Display, histogram_lines
from echelon.report.runs import discard_run, latest_run, new_run
from echelon.report.summary import RunState, summary, write_summary
from echelon.schemes import SCHEMES, rules_for
from echelon.train.flags import no_effect as vain
from echelon.train.flags.arguments import Parser, add_augment_arguments, add_data_arguments, add_fit_arguments
from echelon.train.loop.fit import fit
from echelon.train.recipe.options import TrainOptions
from echelon.train.recipe.plan import shares_for
from echelon.train.script import LOG_FORMAT, read_options
from echelon.train.script import check as check_options

DEMO = "-n 4 -s 2 --kv-store dist_gsync --groups 0,1,2/3 --pace 0.02 --slow 3:3 --num-epochs 16"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `train`."""
    parser = subparsers.add_parser("train", help="train a model on many workers", description=__doc__)
    add_job_arguments(parser, default_workers=1)
    parser.add_argument("--demo", action="store_true", help=f"the demonstration: {DEMO}")
    parser.add_argument("--name", help="name of the run (default: the time and the store)")
    parser.add_argument("--data", default="digits", help="digits, mnist, fashion-mnist, cifar10, imagenet, folder, …")
    own = parser.own if isinstance(parser, Parser) else parser.add_argument
    add_fit_arguments(parser, own)
    add_data_arguments(parser, own)
    add_augment_arguments(parser, own)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Start the job, watch it, and write down what it came to."""
    if options.demo:
        parser = argparse.ArgumentParser()
        add_parser(parser.add_subparsers())
        options = parser.parse_args(["train", *DEMO.split()])
    settings = read_options(options, options.data)
    job = job_from(options)
    if not settings.kv_store.startswith("dist_") or "device" in settings.kv_store:
        job = replace(job, num_servers=0)
    local.check(job)
    check(settings, job)
    vain.warn(options)
    if settings.test_io:
        logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stdout)
        return fit(settings)
    before, directory = latest_run(), new_run(options.name, settings.kv_store)
    job = replace(job, run_dir=str(directory))
    status, state = watch(job, settings, directory)
    if status and not state.has_trained:  # there is only the error, and it is told
        discard_run(directory, before)
        return status
    facts = summary(state, settings.kv_store, asdict(settings), status)
    write_summary(directory, facts)
    draw_curves(facts, directory / "curves.png")
    conclude(facts, state, directory)
    return status


def check(settings: TrainOptions, job: Job) -> None:
    """What is wrong with the arguments is said once, before anything is started or written."""
    num_workers = job.num_workers
    check_options(settings, job)
    if num_workers > 1 and not settings.kv_store.startswith("dist_"):
        raise UsageError(f"--kv-store {settings.kv_store} is for one worker; with -n {num_workers} use a dist_ store")
    if settings.kv_store in SCHEMES:
        if settings.kv_store != "dist_sync" and not job.num_servers:
            raise UsageError(
                f"--kv-store {settings.kv_store} needs a server, and -s is 0: give -s 1 or more (dist_sync needs none)"
            )
        rules_for(settings.kv_store, settings.staleness, groups_of(settings, job))
    ranks = [rank for rank in settings.pace.slow if rank >= num_workers]
    if ranks:
        raise UsageError(f"--slow names worker {ranks[0]}, but ranks go from 0 to {num_workers - 1}")
    if settings.data_allocator:
        shares_for(settings, num_workers)


def groups_of(settings: TrainOptions, job: Job) -> list[list[int]] | None:
    """The groups of ranks that the workers of this machine will read."""
    given = find_groups(settings.groups)
    if given is None or settings.kv_store != "dist_gsync":
        return [[0]] if settings.groups else None
    return read_groups(given, local.hosts_of(job))


def watch(job: Job, settings: TrainOptions, directory: Path) -> tuple[int, RunState]:
    """Run the workers under a display."""
    command = [sys.executable, "-m", "echelon.train", msgspec.json.encode(settings).decode()]
    title = f"{settings.network} on {settings.data}, {settings.kv_store}, -n {job.num_workers} -s {job.num_servers}"
    with Display(directory, title) as display:
        status = local.run(job, command, on_line=once(display.print), on_tick=display.update, shown=True)
    return status, display.state


def once(show: OnLine) -> OnLine:
    """Show last words that workers have in common, as those about a file that is missing, of the first one only."""
    said: dict[str, str] = {}
    leaving: set[str] = set()

    def on_line(name: str, text: str) -> None:
        if text.startswith("error: "):  # as `python -m echelon.train` ends
            leaving.add(name)
        if name not in leaving or said.setdefault(text, name) == name:
            show(name, text)

    return on_line


def conclude(facts: dict[str, Any], state: RunState, directory: Path) -> None:
    """The last lines: what came out and where it is."""
    if facts["accuracy"] is not None:
        print(f"accuracy      {facts['accuracy']:.4f}")
    print(f"samples/s     {facts['samples_per_s']:.0f}  ({facts['samples']} samples in {facts['seconds']:.1f} s)")
    histogram = state.histogram()
    if histogram:
        print(
            "staleness     updates by others between a read and the push that followed it, and how many steps saw that"
        )
        print("\n".join(histogram_lines(histogram)))
    print(f"written to    {directory}/  (also runs/latest)")
