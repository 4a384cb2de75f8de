"""`echelon train`: the built-in trainer on many workers of this machine, with a live display and a run directory."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

from echelon import models
from echelon.cli.launch import add_job_arguments, job_from
from echelon.cluster.shares import inline_groups, parse_groups
from echelon.data.datasets import dataset_names, open_dataset
from echelon.environment import Job
from echelon.errors import UsageError
from echelon.kvstore.create import GROUPS_FILE, check_name
from echelon.launch import local
from echelon.models.choices import unknown
from echelon.report.curves import draw_curves
from echelon.report.display import Display, histogram_lines
from echelon.report.runs import new_run
from echelon.report.summary import RunState, summary, write_summary
from echelon.schemes import rules_for
from echelon.train.fit import shares_for
from echelon.train.options import OPTIMIZERS, TrainOptions
from echelon.train.pace import Pace, parse_slow, parse_stall

DEMO = "-n 4 -s 2 --kv-store dist_gsync --groups 0,1,2/3 --pace 0.02 --slow 3:3 --num-epochs 16"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `train`."""
    defaults = TrainOptions()
    parser = subparsers.add_parser("train", help="train a model on many workers", description=__doc__)
    add_job_arguments(parser, default_workers=1)
    parser.add_argument("--demo", action="store_true", help=f"the demonstration: {DEMO}")
    parser.add_argument("--name", help="name of the run (default: the time and the store)")
    parser.add_argument("--data", default=defaults.data, help="digits, mnist, fashion-mnist, cifar10, …")
    parser.add_argument("--data-dir", default=defaults.data_dir, help="where data files are")
    parser.add_argument("--network", default=defaults.network, help="the network, by name or package.module:function")
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--kv-store", default=defaults.kv_store, help="how strictly workers wait for each other")
    parser.add_argument("--staleness", type=int, help="bound for dist_ssync, optional for dist_gsync")
    parser.add_argument("--groups", help="for dist_gsync: a groups file, or ranks as 0,1,2/3")
    parser.add_argument("--data-allocator", type=int, default=0, help="1: shares of the data as data_sharding says")
    parser.add_argument("--data-sharding", default=defaults.data_sharding, help="the file of shares")
    parser.add_argument("--batch-size", type=int, default=defaults.batch_size, help="of each worker")
    parser.add_argument("--num-epochs", type=int, default=defaults.num_epochs)
    parser.add_argument("--optimizer", default=defaults.optimizer, help="sgd, adam, adamw, rmsprop or adagrad")
    parser.add_argument("--lr", type=float, default=defaults.lr)
    parser.add_argument("--lr-factor", type=float, default=defaults.lr_factor)
    parser.add_argument("--lr-step-epochs", default="", help="epochs at which lr is multiplied by lr-factor: 30,60")
    parser.add_argument("--mom", type=float, default=defaults.momentum, help="momentum")
    parser.add_argument("--wd", type=float, default=defaults.weight_decay, help="weight decay")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--eval-every", type=int, default=0, help="steps of rank 0 between evaluations (0: an epoch)")
    parser.add_argument("--target-accuracy", type=float, help="stop when the validation accuracy reaches this")
    parser.add_argument("--average-buffers", action="store_true", help="average BatchNorm statistics at the end")
    parser.add_argument("--check-finite", action="store_true", help="refuse NaN and infinity in gradients")
    parser.add_argument("--pace", type=float, default=0.0, metavar="SECONDS", help="a step lasts at least this long")
    parser.add_argument("--slow", metavar="RANK:FACTOR", help="slow one worker down")
    parser.add_argument("--stall", metavar="PROBABILITY:FACTOR", help="stall steps at random")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Start the job, watch it, and write down what it came to."""
    if options.demo:
        parser = argparse.ArgumentParser()
        add_parser(parser.add_subparsers())
        options = parser.parse_args(["train", *DEMO.split()])
    settings = options_from(options)
    check(settings, options.num_workers)
    job = job_from(options)
    if not settings.kv_store.startswith("dist_"):
        job = replace(job, num_servers=0)
    local.check(job)
    directory = new_run(options.name, settings.kv_store)
    job = replace(job, run_dir=str(directory))
    status, state = watch(job, settings, directory)
    facts = summary(state, settings.kv_store, asdict(settings), status)
    write_summary(directory, facts)
    draw_curves(facts, directory / "curves.png")
    conclude(facts, state, directory)
    return status


def check(settings: TrainOptions, num_workers: int) -> None:
    """What is wrong with the arguments is said once, before anything is started or written."""
    check_name(settings.kv_store)
    if settings.kv_store.startswith("dist_"):
        rules_for(settings.kv_store, settings.staleness, groups_of(settings, num_workers))
    if settings.optimizer not in OPTIMIZERS:
        raise UsageError(f"there is no optimizer {settings.optimizer!r}; use one of {', '.join(OPTIMIZERS)}")
    if settings.data not in dataset_names():
        open_dataset(settings.data)  # raises
    if ":" not in settings.network and settings.network not in models.names():
        raise unknown("network", settings.network, models.names(), " Your own is named package.module:function.")
    if settings.data_allocator:
        shares_for(settings, num_workers)


def groups_of(settings: TrainOptions, num_workers: int) -> list[list[int]] | None:
    """The groups as far as they are known before hosts are."""
    hosts = dict.fromkeys(range(num_workers), "")
    given = settings.groups or (GROUPS_FILE if Path(GROUPS_FILE).is_file() else None)
    if given is None or settings.kv_store != "dist_gsync":
        return [[0]] if settings.groups else None
    if (text := inline_groups(given)) is not None:
        return [list(group) for group in parse_groups(text, hosts, f"groups {given!r}")]
    if not Path(given).is_file():
        raise UsageError(f"there is no groups file {given}; write one group a line, hosts or ranks")
    return [[0]]


def watch(job: Job, settings: TrainOptions, directory: Path) -> tuple[int, RunState]:
    """Run the workers under a display."""
    command = [sys.executable, "-m", "echelon.train", msgspec.json.encode(settings).decode()]
    title = f"{settings.network} on {settings.data}, {settings.kv_store}, -n {job.num_workers} -s {job.num_servers}"
    with Display(directory, title) as display:
        status = local.run(job, command, on_line=display.print, on_tick=display.update)
    return status, display.state


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


def options_from(options: argparse.Namespace) -> TrainOptions:
    """The run that the arguments describe."""
    if options.num_workers > 1 and not options.kv_store.startswith("dist_"):
        raise UsageError(
            f"--kv-store {options.kv_store} is for one worker; with -n {options.num_workers} use a dist_ store"
        )
    if options.batch_size < 1 or options.num_epochs < 1:
        raise UsageError("--batch-size and --num-epochs must be 1 or more")
    slow = parse_slow(options.slow) if options.slow else {}
    ranks = [rank for rank in slow if rank >= options.num_workers]
    if ranks:
        raise UsageError(f"--slow names worker {ranks[0]}, but ranks go from 0 to {options.num_workers - 1}")
    return TrainOptions(
        data=options.data,
        data_dir=options.data_dir,
        network=options.network,
        num_layers=options.num_layers,
        kv_store=options.kv_store,
        staleness=options.staleness,
        groups=options.groups.replace(",", " ") if options.groups else None,
        data_allocator=bool(options.data_allocator),
        data_sharding=options.data_sharding,
        batch_size=options.batch_size,
        num_epochs=options.num_epochs,
        optimizer=options.optimizer,
        lr=options.lr,
        lr_factor=options.lr_factor,
        lr_step_epochs=parse_epochs(options.lr_step_epochs),
        momentum=options.mom,
        weight_decay=options.wd,
        seed=options.seed,
        eval_every=options.eval_every,
        target_accuracy=options.target_accuracy,
        average_buffers=options.average_buffers,
        check_finite=options.check_finite,
        pace=Pace(options.pace, slow, parse_stall(options.stall) if options.stall else None, options.seed),
    )


def parse_epochs(text: str) -> tuple[float, ...]:
    """`30,60`."""
    try:
        return tuple(float(step) for step in text.split(",") if step)
    except ValueError:
        raise UsageError(f"--lr-step-epochs {text!r} is not a list of epochs, for example 30,60") from None
