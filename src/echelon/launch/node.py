"""One node at a time: the processes of one machine, which finds the other machines by the address of node 0.

The same command is started on every machine with its own number, as in `echelon node 1 --num-nodes 2 --rendezvous
eth0:10.0.0.1:29500 -- python train.py`. Each node runs one worker and, by default, one server; node 0 also runs the
scheduler, at the rendezvous. The ranks are the numbers of the nodes. Nothing logs in to another machine, so all need
the same credentials: those of the user (`transport.credentials`), or of a file.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace

from echelon.cluster.messages import SERVER, WORKER
from echelon.environment import HIGHEST_PORT, Job
from echelon.errors import UsageError
from echelon.launch.addresses import own_addresses
from echelon.launch.interface import Output
from echelon.launch.local.launcher import ChildBackend
from echelon.launch.plan import SCHEDULER, Address, Addresses, Plan, Request, make_plan
from echelon.launch.run import run_job
from echelon.transport.registration import interface_address

EXAMPLE = "eth0:10.0.0.1:29500 or 10.0.0.1:29500"


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where node 0 listens, and the network interface that every node uses."""

    host: str
    port: int
    interface: str | None = None

    @property
    def addresses(self) -> Addresses:
        """The scheduler's address, and worker 0's for stores without servers: the next port."""
        return Addresses(Address(self.host, self.port), Address(self.host, self.port + 1))


def parse_rendezvous(text: str, where: str = "--rendezvous") -> Rendezvous:
    """Return the rendezvous of `INTERFACE:IP:PORT` or `IP:PORT`. `where` names its origin in errors."""
    *names, port = text.split(":")
    if len(names) not in (1, 2) or not all(names):
        raise UsageError(f"{where} is {text!r}; write INTERFACE:IP:PORT or IP:PORT, for example {EXAMPLE}")
    if not port.isdecimal() or not 0 < int(port) < HIGHEST_PORT:
        raise UsageError(f"{where} is {text!r}: {port!r} is not a port; write a number from 1 to {HIGHEST_PORT - 1}")
    interface = names[0] if len(names) == 2 else None
    return Rendezvous(_resolved(names[-1], text, where), int(port), interface)


def _resolved(host: str, text: str, where: str) -> str:
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return socket.gethostbyname(host)
    except (OSError, UnicodeError):
        raise UsageError(
            f"{where} is {text!r}, but {host!r} is neither an IP address nor a known host: write the address of node 0"
        ) from None


def node_job(num_nodes: int, num_servers: int, run_dir: str | None) -> Job:
    """Return the job of all nodes, with the settings of the environment. It has no credentials but the user's."""
    environment = Job.from_environment()
    return Job(
        num_workers=num_nodes,
        num_servers=num_servers,
        interface=environment.interface,
        verbose=environment.verbose,
        timeout_s=environment.timeout_s,
        heartbeat_timeout_s=environment.heartbeat_timeout_s,
        transport=environment.transport,
        stall_seconds=environment.stall_seconds,
        allow_optimizers=environment.allow_optimizers,
        run_dir=run_dir,
        min_workers=environment.min_workers,
        max_workers=environment.max_workers,
        replicas=environment.replicas,
        max_restarts=environment.max_restarts,
        security=environment.security,
        credentials=environment.credentials,
        credentials_file=environment.credentials_file,
    )


def node_plan(request: Request, rank: int, rendezvous: Rendezvous) -> Plan:
    """Return what node `rank` runs of a job with one worker per node: its worker and its servers."""
    num_nodes = request.job.num_workers
    if not 0 <= rank < num_nodes:
        raise UsageError(f"node {rank} does not exist: a job of {num_nodes} nodes has the nodes 0 to {num_nodes - 1}")
    servers_per_node = request.job.num_servers // num_nodes
    job = replace(
        request.job,
        scheduler_host=rendezvous.host,
        scheduler_port=rendezvous.port,
        interface=rendezvous.interface or request.job.interface,
    )
    plan = make_plan(replace(request, job=job))
    first = rank * servers_per_node
    ranks = {SCHEDULER: [0] if rank == 0 else [], SERVER: range(first, first + servers_per_node), WORKER: [rank]}
    mine = [process for process in plan.processes if process.rank in ranks[process.role]]
    return replace(plan, processes=tuple(replace(process, local_workers=1) for process in mine))


def run_node(plan: Plan, rendezvous: Rendezvous, output: Output) -> int:
    """Run the processes of this node until they have ended, and return their exit status."""
    if plan.job.interface:
        interface_address(plan.job.interface)  # raises if this machine does not have it
    addresses = rendezvous.addresses
    if not plan.job.num_servers:
        addresses = Addresses(addresses.scheduler, addresses.scheduler)
    with ExitStack() as stack:
        listeners = {
            process.name: stack.enter_context(
                listen_at(addresses.scheduler if process.role == SCHEDULER else addresses.rendezvous)
            )
            for process in plan.processes
            if process.listens
        }
        _say_where(plan, rendezvous)
        backend = ChildBackend(plan, listeners, addresses, stack, one_machine=False)
        return run_job(plan, output, backend, workers_elsewhere=plan.job.num_workers > 1)


def _say_where(plan: Plan, rendezvous: Rendezvous) -> None:
    rank, num_nodes = plan.of_role(WORKER)[0].rank, plan.job.num_workers
    waits = "waits for the others at" if rank == 0 else "waits for node 0 at"
    print(
        f"echelon: node {rank} of {num_nodes} {waits} {rendezvous.host}:{rendezvous.port}", file=sys.stderr, flush=True
    )


def listen_at(address: Address) -> socket.socket:
    """Return a socket that listens at an address of this machine, which must be node 0."""
    try:
        return socket.create_server(address, backlog=128)
    except OSError as error:
        where = f"{address.host}:{address.port}"
        if error.errno == errno.EADDRNOTAVAIL:
            have = ", ".join(f"{own} ({name})" for name, own in own_addresses())
            raise UsageError(
                f"the rendezvous {where} is not on this machine, which has {have}: start node 0 on {address.host}, or "
                "give the address of this machine as the rendezvous on all nodes"
            ) from error
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"port {address.port} of {address.host} is taken: end the program that uses it, or choose another port "
                "for the rendezvous on all nodes (a job needs the port and the next one)"
            ) from error
        raise UsageError(f"node 0 cannot listen at {where}: {os.strerror(error.errno or 0)}") from error
