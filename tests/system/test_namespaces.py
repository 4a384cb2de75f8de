"""A job over a virtual network, each role started by hand: scheduler, servers and workers on two hosts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import Host, Network, make_hosts

pytestmark = pytest.mark.system

PROGRAM = Path(__file__).with_name("namespace_worker.py")
PORT = 29811


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with make_hosts(tmp_path, 2, sshd=False) as network:
        yield network


def start(host: Host, root: str, role: str, rank: int, transport: str) -> subprocess.Popen[str]:
    job = {
        "DMLC_ROLE": role,
        "DMLC_PS_ROOT_URI": root,
        "DMLC_PS_ROOT_PORT": str(PORT),
        "DMLC_NUM_WORKER": "2",
        "DMLC_NUM_SERVER": "2",
        "DMLC_INTERFACE": "eth0",
        "ECHELON_RANK": str(rank),
        "ECHELON_TRANSPORT": transport,
        "ECHELON_TIMEOUT": "60",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(PROGRAM), "dist_sync"]
    return host.start(command, environment=job, stderr=subprocess.STDOUT)


@pytest.mark.parametrize("transport", ["tcp", "auto"])
def test_a_job_spans_two_hosts(network: Network, transport: str) -> None:
    """Each host has one server and one worker. Every role runs the same script and gets its interface by name."""
    h1, h2 = network.hosts
    places = [(h1, "scheduler", 0), (h1, "server", 0), (h2, "server", 1), (h1, "worker", 0), (h2, "worker", 1)]
    processes = {f"{role} {rank}": start(host, h1.address, role, rank, transport) for host, role, rank in places}
    outputs = {name: process.communicate(timeout=90)[0] for name, process in processes.items()}
    statuses = {name: process.returncode for name, process in processes.items()}
    assert statuses == dict.fromkeys(processes, 0), outputs
    shared = transport == "auto"  # both hosts are on one machine, so they can share memory
    for rank, host in enumerate(network.hosts):
        assert f"worker {rank} on {host.address}: sum 3.0 shared {shared}" in outputs[f"worker {rank}"]
