"""Jobs over a slow link: priorities have an effect."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import Host, Network, make_hosts

from echelon.environment import CREDENTIALS
from echelon.transport.admission.credentials import Credentials

pytestmark = pytest.mark.system

FOLDER = Path(__file__).parent
PORT = 29813


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with make_hosts(tmp_path, 2, sshd=False) as network:
        yield network


def run_job(
    network: Network, program: str, root: str, interface: str, *, num_workers: int, transport: str = "tcp"
) -> list[str]:
    """Run a program with a server and the scheduler on the first host. Return what the workers print.

    Workers alternate between the hosts, beginning with the second one.
    """
    h1, h2 = network.hosts
    credentials = Credentials.create().to_text()

    def start(host: Host, role: str, rank: int) -> subprocess.Popen[str]:
        job = {
            "DMLC_ROLE": role,
            "DMLC_PS_ROOT_URI": root,
            "DMLC_PS_ROOT_PORT": str(PORT),
            "DMLC_NUM_WORKER": str(num_workers),
            "DMLC_NUM_SERVER": "1",
            "DMLC_INTERFACE": interface,
            "ECHELON_RANK": str(rank),
            "ECHELON_TRANSPORT": transport,
            "ECHELON_TIMEOUT": "60",
            "OMP_NUM_THREADS": "1",
            CREDENTIALS: credentials,
        }
        command = [sys.executable, str(FOLDER / program)]
        return host.start(command, environment=job, stderr=subprocess.STDOUT)

    serving = [start(h1, "scheduler", 0), start(h1, "server", 0)]
    workers = [start([h2, h1][rank % 2], "worker", rank) for rank in range(num_workers)]
    outputs = [process.communicate(timeout=120)[0] for process in [*workers, *serving]]
    assert [process.returncode for process in [*workers, *serving]] == [0] * len(outputs), outputs
    return outputs[:num_workers]


def test_the_first_layers_arrive_first_over_a_slow_link(network: Network) -> None:
    """40 MB over 400 Mbit/s. What the kernel has accepted, some megabytes, cannot be overtaken."""
    h1, h2 = network.hosts
    for host in (h1, h2):
        limit = ["tbf", "rate", "400mbit", "burst", "256kb", "limit", "1mb"]
        host.run(["tc", "qdisc", "add", "dev", "eth0", "root", *limit])
    (output,) = run_job(network, "priority_worker.py", h1.address, "eth0", num_workers=1)
    counts = {use: int(count) for use, count in re.findall(r"priority (\w+): (\d+) layers", output)}
    assert output.count("correct True") == 2, output
    assert counts["False"] == 39, output
    assert counts["True"] < 20, output
