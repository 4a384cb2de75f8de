"""Which processes a contender consists of: one per role and rank, all on the loopback interface."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from echelon.bench.harness.mxnet_environment import MXNET_DEFAULTS, MXNET_STORES, mxnet_command
from echelon.bench.harness.process import ProcessSpec
from echelon.environment import Job
from echelon.errors import UsageError
from echelon.launch.processes import LOOPBACK, free_port

NO_VARIABLES: Mapping[str, str] = {}
JOB_FLAGS = ("num_workers", "num_servers", "kv_store", "transport")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """The job that every contender of a run sets up. `work_dir` holds logs and rendezvous files during the run."""

    work_dir: Path
    num_workers: int = 2
    num_servers: int = 2
    kv_store: str = "dist_sync"
    transport: str = "auto"


def job_fields(args: argparse.Namespace, work_dir: Path) -> dict[str, Any]:
    """Return the fields of a JobPlan from the command line."""
    return {"work_dir": work_dir, **{name: getattr(args, name) for name in JOB_FLAGS}}


def check_job(args: argparse.Namespace) -> None:
    """Raise UsageError if the command line describes a job without workers or servers, or repeats a peer."""
    if args.num_workers < 1 or args.num_servers < 1:
        raise UsageError(f"needs at least one worker and one server; got -n {args.num_workers} -s {args.num_servers}")
    if len(set(args.peer)) < len(args.peer):
        raise UsageError(f"name each --peer only once; got {', '.join(args.peer)}")


def echelon_specs(
    plan: JobPlan, module: str, flags: Sequence[str], env: Mapping[str, str] = NO_VARIABLES
) -> list[ProcessSpec]:
    """Return the scheduler, servers and workers of an Echelon job; each runs `module` in its role."""
    argv = [sys.executable, "-m", module, *flags, "--kv-store", plan.kv_store]
    return [ProcessSpec(_label(job), argv, env, driven=job.role == "worker", job=job) for job in _roles(plan)]


def mxnet_specs(
    plan: JobPlan, script: Path, flags: Sequence[str], env: Mapping[str, str] = NO_VARIABLES
) -> list[ProcessSpec]:
    """Return the scheduler, servers and workers of an MXNet job; each runs `script` in its role."""
    if plan.kv_store not in MXNET_STORES:
        raise UsageError(f"MXNet has no store {plan.kv_store!r}; compare with it under {' or '.join(MXNET_STORES)}")
    argv = [*mxnet_command(script), *flags, "--kv-store", plan.kv_store]
    port = free_port()
    return [
        ProcessSpec(
            _label(job),
            argv,
            {**replace(job, scheduler_port=port).to_environment(), **MXNET_DEFAULTS, **env},
            driven=job.role == "worker",
        )
        for job in _roles(plan)
    ]


def gloo_specs(
    plan: JobPlan, name: str, module: str, flags: Sequence[str], env: Mapping[str, str] = NO_VARIABLES
) -> list[ProcessSpec]:
    """Return one rank of a Gloo process group per worker. Servers have no counterpart there."""
    url = f"file://{plan.work_dir / name}.store?world_size={plan.num_workers}&rank="
    argv = [sys.executable, "-m", module, *flags, "--process-group"]
    variables = {"GLOO_SOCKET_IFNAME": "lo", **env}
    return [
        ProcessSpec(f"rank {rank}", [*argv, f"{url}{rank}"], variables, driven=True) for rank in range(plan.num_workers)
    ]


def _roles(plan: JobPlan) -> list[Job]:
    """Return the job as each of its processes sees it, still without a port."""
    job = Job(num_workers=plan.num_workers, num_servers=plan.num_servers, host=LOOPBACK, transport=plan.transport)
    counts = {"scheduler": 1, "server": job.num_servers, "worker": job.num_workers}
    return [job.as_role(role, rank) for role, count in counts.items() for rank in range(count)]


def _label(job: Job) -> str:
    return f"{job.role} {job.rank}"
