"""A job over a virtual network: scheduler, servers and workers in two network namespaces joined by a veth pair."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

HOSTS = {"left": "10.213.7.1", "right": "10.213.7.2"}
PROGRAM = Path(__file__).with_name("namespace_worker.py")
PORT = 29811


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def cable() -> Iterator[dict[str, str]]:
    """Create two namespaces with one interface each, which is named `cable` in both."""
    names = {side: f"echelon-{os.getpid()}-{side}" for side in HOSTS}
    for name in names.values():
        ip("netns", "add", name)
    try:
        ends = [f"ec{os.getpid() % 100000}{side[0]}" for side in HOSTS]
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for end, (side, name) in zip(ends, names.items(), strict=True):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "link", "set", end, "name", "cable")
            ip("-n", name, "addr", "add", f"{HOSTS[side]}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names.values():
            ip("netns", "del", name)


def start(namespace: str, role: str, rank: int, store: str, transport: str) -> subprocess.Popen[str]:
    job = {
        "DMLC_ROLE": role,
        "DMLC_PS_ROOT_URI": HOSTS["left"],
        "DMLC_PS_ROOT_PORT": str(PORT),
        "DMLC_NUM_WORKER": "2",
        "DMLC_NUM_SERVER": "2",
        "DMLC_INTERFACE": "cable",
        "ECHELON_RANK": str(rank),
        "ECHELON_TRANSPORT": transport,
        "ECHELON_TIMEOUT": "60",
        "OMP_NUM_THREADS": "1",
    }
    command = ["ip", "netns", "exec", namespace, sys.executable, str(PROGRAM), store]
    return subprocess.Popen(
        command, env={**os.environ, **job}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.parametrize("transport", ["tcp", "auto"])
def test_a_job_spans_two_hosts(cable: dict[str, str], transport: str) -> None:
    """Each side has one server and one worker. Every role runs the same script and gets its interface by name."""
    left, right = cable["left"], cable["right"]
    places = [
        (left, "scheduler", 0),
        (left, "server", 0),
        (right, "server", 1),
        (left, "worker", 0),
        (right, "worker", 1),
    ]
    processes = {
        f"{role} {rank}": start(namespace, role, rank, "dist_sync", transport) for namespace, role, rank in places
    }
    outputs = {name: process.communicate(timeout=90)[0] for name, process in processes.items()}
    statuses = {name: process.returncode for name, process in processes.items()}
    assert statuses == dict.fromkeys(processes, 0), outputs
    shared = transport == "auto"  # both namespaces are on one machine, so they can share memory
    for rank, host in enumerate(HOSTS.values()):
        assert f"worker {rank} on {host}: sum 3.0 shared {shared}" in outputs[f"worker {rank}"]
