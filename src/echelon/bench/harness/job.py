"""Which processes a contender consists of: one per role and rank, on this machine or on several hosts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from echelon.bench.harness.checks import check_turns
from echelon.bench.harness.mxnet_environment import MXNET_DEFAULTS, MXNET_STORES, mxnet_command
from echelon.bench.harness.process import ProcessSpec
from echelon.bench.harness.remote import Hosts
from echelon.environment import Job
from echelon.errors import UsageError
from echelon.launch.supervision.processes import free_port
from echelon.transport.admission.credentials import Credentials
from echelon.transport.listening import LOOPBACK

NO_VARIABLES: Mapping[str, str] = {}
JOB_FLAGS = ("num_workers", "num_servers", "kv_store", "transport", "security")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """The job that every contender of a run sets up. `work_dir` holds logs and rendezvous files during the run."""

    work_dir: Path
    num_workers: int = 2
    num_servers: int = 2
    kv_store: str = "dist_sync"
    transport: str = "auto"
    security: str = "auto"
    replicas: int = 0
    hosts: Hosts | None = None

    @property
    def address(self) -> str:
        """Where the scheduler of an Echelon job listens, on this machine."""
        return self.hosts.own_address() if self.hosts else LOOPBACK


def job_fields(args: argparse.Namespace, work_dir: Path) -> dict[str, Any]:
    """Return the fields of a JobPlan from the command line."""
    hosts = Hosts(tuple(args.hosts.split(",")), args.interface, args.ssh_config) if args.hosts else None
    return {"work_dir": work_dir, "hosts": hosts, **{name: getattr(args, name) for name in JOB_FLAGS}}


def check_job(args: argparse.Namespace) -> None:
    """Raise UsageError if the command line describes a job without workers or servers, or measures nothing."""
    if args.num_workers < 1 or args.num_servers < 1:
        raise UsageError(f"needs at least one worker and one server; got -n {args.num_workers} -s {args.num_servers}")
    check_turns(args)


def echelon_specs(
    plan: JobPlan, module: str, flags: Sequence[str], env: Mapping[str, str] = NO_VARIABLES
) -> list[ProcessSpec]:
    """Return the scheduler, servers and workers of an Echelon job; each runs `module` in its role."""
    argv = [sys.executable, "-m", module, *flags, "--kv-store", plan.kv_store]
    specs = [ProcessSpec(_label(job), argv, env, driven=job.role == "worker", job=job) for job in _roles(plan)]
    return _on_hosts(plan, specs)


def mxnet_specs(
    plan: JobPlan, script: Path, flags: Sequence[str], env: Mapping[str, str] = NO_VARIABLES
) -> list[ProcessSpec]:
    """Return the scheduler, servers and workers of an MXNet job; each runs `script` in its role."""
    if plan.kv_store not in MXNET_STORES:
        raise UsageError(f"MXNet has no store {plan.kv_store!r}; compare with it under {' or '.join(MXNET_STORES)}")
    argv = [*mxnet_command(script), *flags, "--kv-store", plan.kv_store]
    port = free_port()
    jobs = [replace(job, scheduler_host=plan.address, scheduler_port=port, credentials=None) for job in _roles(plan)]
    specs = [
        ProcessSpec(
            _label(job),
            argv,
            {**job.to_environment(), **MXNET_DEFAULTS, **env},
            driven=job.role == "worker",
        )
        for job in jobs
    ]
    return _on_hosts(plan, specs)


def gloo_specs(
    plan: JobPlan, name: str, module: str, flags: Sequence[str], env: Mapping[str, str] = NO_VARIABLES
) -> list[ProcessSpec]:
    """Return one rank of a Gloo process group per worker. Servers have no counterpart there."""
    url = f"file://{plan.work_dir / name}.store?world_size={plan.num_workers}&rank="
    argv = [sys.executable, "-m", module, *flags, "--process-group"]
    variables = {"GLOO_SOCKET_IFNAME": plan.hosts.interface if plan.hosts else "lo", **env}
    specs = [
        ProcessSpec(f"rank {rank}", [*argv, f"{url}{rank}"], variables, driven=True) for rank in range(plan.num_workers)
    ]
    return _on_hosts(plan, specs)


def _on_hosts(plan: JobPlan, specs: Sequence[ProcessSpec]) -> list[ProcessSpec]:
    """Put servers, then workers, on the hosts in turn, as launchers do. The scheduler stays on this machine."""
    if plan.hosts is None:
        return list(specs)
    here = [spec for spec in specs if spec.label.startswith("scheduler")]
    away = [spec for spec in specs if spec not in here]
    return here + [replace(spec, command=plan.hosts.command(plan.hosts.at(index))) for index, spec in enumerate(away)]


def _roles(plan: JobPlan) -> list[Job]:
    """Return the job as each of its processes sees it, still without a port."""
    job = Job(
        num_workers=plan.num_workers,
        num_servers=plan.num_servers,
        host=None if plan.hosts else LOOPBACK,
        interface=plan.hosts.interface if plan.hosts else None,
        transport=plan.transport,
        security=plan.security,
        replicas=plan.replicas,
        credentials=None if plan.security == "none" else Credentials.create().to_text(),
    )
    counts = {"scheduler": 1, "server": job.num_servers, "worker": job.num_workers}
    return [job.as_role(role, rank) for role, count in counts.items() for rank in range(count)]


def _label(job: Job) -> str:
    return f"{job.role} {job.rank}"
