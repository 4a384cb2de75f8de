"""One run of `echelon bench schemes`: a job on digits, from its common start to the target accuracy."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from echelon.bench.schemes.cases import CASES, SERVERS, SLOW_RANK, STALENESS, WORKERS, Case
from echelon.bench.schemes.link import SlowLink
from echelon.cluster.messages import WORKER
from echelon.environment import Job
from echelon.errors import JobError
from echelon.launch.interface import Output
from echelon.launch.local.launcher import LocalLauncher
from echelon.launch.plan import Plan, PlannedProcess, Request
from echelon.launch.run import protect
from echelon.observe.events import EventReader
from echelon.report.state.run import RunState
from echelon.schemes import store_kind
from echelon.schemes.stores import Use
from echelon.train.recipe.options import TrainOptions

INTERRUPTED = tuple(128 + number for number in (signal.SIGINT, signal.SIGTERM))


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run: the seconds to the target (infinite if it was not reached), the samples/s, and the accuracy curve."""

    case: str
    store: str
    seed: int
    seconds: float
    samples_per_s: float
    curve: list[tuple[float, float]]


def measure(args: argparse.Namespace, case: str, store: str, seed: int, link: SlowLink | None) -> Outcome:
    """Run one job. `link`: the slow worker of a case with a slow link runs behind it."""
    options = options_of(args, CASES[case], store, seed)
    with tempfile.TemporaryDirectory(prefix="echelon-schemes-") as folder:
        job = Job(num_workers=WORKERS, num_servers=SERVERS, run_dir=folder)
        command = [sys.executable, "-m", "echelon.train", msgspec.json.encode(options).decode()]
        lines: list[str] = []
        status = run_job(job, command, link if CASES[case].slow_link else None, lines)
        if status in INTERRUPTED:
            raise KeyboardInterrupt
        if status:
            raise JobError(f"{case}, {store}, seed {seed}: exit status {status}\n" + "\n".join(lines[-20:]))
        state = RunState()
        state.take(EventReader(Path(folder)).poll())
    curve = [(event["seconds"], event["accuracy"]) for event in state.validations]
    reached = next((seconds for seconds, accuracy in curve if accuracy >= args.target), float("inf"))
    return Outcome(case, store, seed, reached, state.samples / max(state.seconds, 1e-9), curve)


def options_of(args: argparse.Namespace, case: Case, store: str, seed: int) -> TrainOptions:
    """Return what the workers of a run train."""
    kind = store_kind(store)
    return TrainOptions(
        kv_store=store,
        staleness=STALENESS if kind.staleness is Use.REQUIRED else None,
        groups=case.groups if kind.takes_groups else None,
        batch_size=args.batch_size,
        num_epochs=args.limit_epochs,
        lr=lr_of(args, case),
        seed=seed,
        eval_every=2,
        target_accuracy=args.target,
        pace=replace(case.pace, seconds=args.pace, seed=seed),
    )


def lr_of(args: argparse.Namespace, case: Case) -> float:
    """Return the learning rate of a case."""
    return round(float(args.lr * case.lr_factor), 10)


def run_job(job: Job, command: list[str], link: SlowLink | None, lines: list[str]) -> int:
    """Run a job on this machine, with the slow worker behind the link if there is one. `lines` gets its output."""
    launcher = LocalLauncher() if link is None else LocalLauncher(link.address)
    plan = protect(launcher.plan(Request(job, command)))
    output = Output(lambda name, text: lines.append(f"[{name}] {text}"))
    return launcher.run(plan if link is None else behind(link, plan), output)


def behind(link: SlowLink, plan: Plan) -> Plan:
    """Return the plan with the slow worker behind the link. Its tensors must not take the way of shared memory."""

    def moved(process: PlannedProcess) -> PlannedProcess:
        if (process.role, process.rank) != (WORKER, SLOW_RANK):
            return process
        own = replace(process.job, transport="tcp")
        return replace(process, arguments=link.command(process.arguments), job=own)

    return replace(plan, processes=tuple(moved(process) for process in plan.processes))
