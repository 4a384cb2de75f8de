"""Nodes that are started one at a time on two hosts: torchrun on each, and an error. test_seeds.py has the others."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hosts import Host, Network, make_hosts

pytestmark = pytest.mark.system

COLLECTIVE = """
import torch, echelon
store = echelon.kvstore.create("dist_device_sync")
store.init("x", torch.zeros(3))
out = torch.zeros(3)
store.pushpull("x", torch.full((3,), store.rank + 1.0), out)
print("has", out[0].item())
"""


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with make_hosts(tmp_path / "network", 2) as network:
        yield network
        network.assert_nothing_runs(within_s=40.0)


def run_on_both(
    network: Network, commands: Mapping[str, list[str]], environment: Mapping[str, str], cwd: Path
) -> list[str]:
    """Start a command on each host, and return their outputs."""

    def start(host: Host) -> subprocess.Popen[str]:
        return host.start(commands[host.name], environment=environment, cwd=cwd, stderr=subprocess.STDOUT)

    processes = [start(host) for host in network.hosts]
    outputs = [process.communicate(timeout=100)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    return outputs


def test_node_0_on_the_wrong_host_gives_one_line(network: Network, tmp_path: Path) -> None:
    address = network.hosts[0].address
    words = ["node", "0", "--num-nodes", "2", "--rendezvous", f"{address}:29500", "--", "true"]
    done = network["h2"].run([sys.executable, "-m", "echelon", *words], check=False)
    assert done.returncode == 2
    assert f"the rendezvous {address}:29500 is not on this machine" in done.stderr
    assert done.stderr.count("\n") == 1


def test_torchrun_on_two_nodes(network: Network, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(COLLECTIVE)
    words = f"-m torch.distributed.run --nnodes 2 --nproc-per-node 1 --master-addr {network.hosts[0].address}"
    commands = {
        host.name: [sys.executable, *words.split(), "--master-port", "29400", "--node-rank", str(rank), str(program)]
        for rank, host in enumerate(network.hosts)
    }
    outputs = run_on_both(network, commands, {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}, tmp_path)
    assert all("has 3.0" in output for output in outputs)
