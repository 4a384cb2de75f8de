"""The Ray launcher: which process is in which bundle of the placement group, and when a job is started again.

Ray chooses the nodes. A bundle has the resources of at most one server and one worker, so that with the strategy
STRICT_SPREAD no two workers share a node.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from typing import Any
from uuid import uuid4

from echelon.cluster.messages import SERVER, WORKER
from echelon.errors import UsageError
from echelon.launch.hosts import Host
from echelon.launch.interface import Output
from echelon.launch.plan import Plan, PlannedProcess, Request, describe, make_plan
from echelon.launch.ray.backend import DriverProcess, RayBackend, say
from echelon.launch.ray.placement import ActorPlace, Placement
from echelon.launch.run import run_job

STRATEGIES = ("SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK")
NODE_PYTHON = "python3"  # on the PATH of an actor's process this is the Python that runs Ray there
_STOPPED = (130, 143)  # the exit statuses of a job that the user has stopped


@dataclass(frozen=True)
class RayOptions:
    """The launcher's own flags: `address` is `--ray-address`, and so on."""

    address: str | None = None
    strategy: str = STRATEGIES[0]
    worker_cpus: float = 1.0
    worker_gpus: float = 0.0
    server_cpus: float = 1.0
    timeout_s: float = 300.0
    max_restarts: int = 0
    upload: bool = False

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> RayOptions:
        """Return the flags among all options of a request. Raises UsageError for values that cannot work."""
        given = {field.name: options.get(f"ray_{field.name}") for field in fields(cls)}
        own = cls(**{name: value for name, value in given.items() if value is not None})
        for name in ("worker_cpus", "server_cpus", "timeout_s"):
            if not getattr(own, name) > 0:
                raise UsageError(f"{_flag(name)} must be above 0, not {getattr(own, name):g}")
        for name in ("worker_gpus", "max_restarts"):
            if not getattr(own, name) >= 0:
                raise UsageError(f"{_flag(name)} must be 0 or more, not {getattr(own, name):g}")
        return own

    def resources(self, role: str) -> tuple[float, float]:
        """Return the CPUs and GPUs of a process. The scheduler is idle most of the time, and reserves none."""
        return {WORKER: (self.worker_cpus, self.worker_gpus), SERVER: (self.server_cpus, 0.0)}.get(role, (0.0, 0.0))


class RayLauncher:
    """Runs a job as actors of a Ray cluster."""

    name = "ray"

    def add_arguments(self, group: argparse._ArgumentGroup) -> None:
        """Add the flags of Ray."""
        default, add = RayOptions(), group.add_argument
        add("--ray-address", metavar="HOST:PORT", help=_ADDRESS_HELP)
        add(
            "--ray-strategy",
            choices=STRATEGIES,
            metavar="NAME",
            help=f"how Ray places workers on nodes: {', '.join(STRATEGIES)} (default: {default.strategy})",
        )
        add("--ray-worker-cpus", type=float, help=f"CPUs and threads of a worker (default: {default.worker_cpus:g})")
        add("--ray-worker-gpus", type=float, help=f"GPUs of a worker (default: {default.worker_gpus:g})")
        add("--ray-server-cpus", type=float, help=f"CPUs of a server (default: {default.server_cpus:g})")
        add(
            "--ray-timeout-s",
            type=float,
            help=f"how long to wait until the cluster has room for the job (default: {default.timeout_s:g})",
        )
        add("--ray-max-restarts", type=int, help=f"{_RESTARTS_HELP} (default: {default.max_restarts})")
        add("--ray-upload", action="store_true", help="let Ray copy this folder to its nodes, and run there")

    def plan(self, request: Request) -> Plan:
        """Assign every process to a bundle. Ray chooses the node of a bundle when the job starts."""
        RayOptions.of(request.options)
        if request.hosts:
            raise UsageError("--launcher ray: Ray chooses the nodes; omit -H, and name the cluster with --ray-address")
        if request.sync_dst_dir is not None:
            raise UsageError("--launcher ray: Ray chooses where it copies a folder to; use --ray-upload")
        num_bundles = max(request.job.num_workers, request.job.num_servers, 1)
        bundles = tuple(Host(f"bundle-{index}") for index in range(num_bundles))
        return make_plan(replace(request, hosts=bundles), scheduler_host=bundles[0], python=NODE_PYTHON)

    def describe(self, plan: Plan) -> str:
        """Return the placement group and the processes as text."""
        placement = make_placement(plan)
        cluster = placement.address or "RAY_ADDRESS, or the one that runs on this machine, or a new one"
        lines = [f"Ray cluster: {cluster}", f"placement group, strategy {placement.strategy}:"]
        lines += [f"    bundle-{index}: {text}" for index, text in enumerate(placement.describe_bundles())]
        return "\n".join([*lines, describe(plan)])

    def run(self, plan: Plan, output: Output) -> int:
        """Run the job, and again if Ray loses a process without which it fails and the user allows restarts."""
        if find_spec("ray") is None:
            raise UsageError("--launcher ray needs Ray, which is not installed: pip install 'echelon[ray]'")
        most = RayOptions.of(plan.request.options).max_restarts
        for restarts in itertools.count():
            placement = make_placement(plan, f"echelon-{uuid4().hex[:8]}")
            with DriverProcess(placement) as driver:
                backend = RayBackend(plan, driver, placement)
                status = run_job(plan, output, backend)
            lost = backend.lost()
            if not status or status in _STOPPED or not lost or restarts == most:
                return status
            say(f"Ray lost {', '.join(lost)}: the whole job starts again (restart {restarts + 1} of {most})")
        raise AssertionError("itertools.count ends")


def make_placement(plan: Plan, name: str = "echelon") -> Placement:
    """Return what a plan asks Ray for. `name` is that of the placement group and of the actors' namespace."""
    options = RayOptions.of(plan.request.options)
    bundles = {host.name: {"CPU": 0.0, "GPU": 0.0} for host in plan.request.hosts}
    index = {host: number for number, host in enumerate(bundles)}

    def place(process: PlannedProcess) -> ActorPlace:
        assert process.host is not None
        cpus, gpus = options.resources(process.role)
        bundles[process.host.name]["CPU"] += cpus
        bundles[process.host.name]["GPU"] += gpus
        return ActorPlace(process.name, index[process.host.name], cpus, gpus)

    actors = [place(process) for process in plan.processes]
    return Placement(
        name,
        options.address,
        options.strategy,
        options.timeout_s,
        [{kind: amount for kind, amount in bundle.items() if amount} for bundle in bundles.values()],
        actors,
        os.getcwd() if options.upload else None,
    )


def _flag(name: str) -> str:
    return f"--ray-{name.replace('_', '-')}"


_ADDRESS_HELP = (
    "the cluster (default: RAY_ADDRESS, or the one that runs on this machine, or a new one; local: always a new one)"
)
_RESTARTS_HELP = (
    "how often to start the whole job again after Ray has lost a process that the job needs; the command must resume "
    "by itself, as with --resume auto"
)
