"""Which processes a contender consists of: one per role and rank, all on the loopback interface."""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from echelon.bench.harness.mxnet_environment import MXNET_DEFAULTS, MXNET_STORES, mxnet_command
from echelon.bench.harness.process import ProcessSpec
from echelon.environment import Job
from echelon.errors import UsageError

NO_VARIABLES: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """The job that every contender of a run sets up. `work_dir` holds logs and rendezvous files during the run."""

    work_dir: Path
    num_workers: int = 2
    num_servers: int = 2
    kv_store: str = "dist_sync"
    transport: str = "auto"


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
    return _role_specs(plan, [sys.executable, "-m", module, *flags, "--kv-store", plan.kv_store], env)


def mxnet_specs(
    plan: JobPlan, script: Path, flags: Sequence[str], env: Mapping[str, str] = NO_VARIABLES
) -> list[ProcessSpec]:
    """Return the scheduler, servers and workers of an MXNet job; each runs `script` in its role."""
    if plan.kv_store not in MXNET_STORES:
        raise UsageError(f"MXNet has no store {plan.kv_store!r}; compare with it under {' or '.join(MXNET_STORES)}")
    argv = [*mxnet_command(script), *flags, "--kv-store", plan.kv_store]
    return _role_specs(plan, argv, {**MXNET_DEFAULTS, **env})


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


def _role_specs(plan: JobPlan, argv: Sequence[str], env: Mapping[str, str]) -> list[ProcessSpec]:
    """Return one process per role and rank. All have the same command line; the environment holds role and rank."""
    job = Job(
        scheduler_port=_free_port(),
        num_workers=plan.num_workers,
        num_servers=plan.num_servers,
        host="127.0.0.1",
        transport=plan.transport,
    )
    counts = {"scheduler": 1, "server": job.num_servers, "worker": job.num_workers}
    return [
        ProcessSpec(
            f"{role} {rank}", argv, {**job.as_role(role, rank).to_environment(), **env}, driven=role == "worker"
        )
        for role, count in counts.items()
        for rank in range(count)
    ]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
