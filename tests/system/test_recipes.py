"""The recipes of the documents on two hosts: ./run RANK on each, a script per scheme over ssh, and torchrun on each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hosts import REPOSITORY, Host, Network, make_hosts

from echelon.transport.credentials import Credentials, write_credentials
from tiny_data import make_data

pytestmark = pytest.mark.system

EXAMPLES = REPOSITORY / "examples" / "image-classification"
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


@pytest.fixture
def commands(tmp_path: Path) -> dict[str, str]:
    """The environment of a user who has `echelon` and its `python` in PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, words in {"echelon": "-m echelon", "python": ""}.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


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


def test_run_rank_on_two_nodes(network: Network, commands: dict[str, str], tmp_path: Path) -> None:
    """The hosts have different home folders, so the credentials file is copied, here by naming one file."""
    for name in ("run", "train_imagenet.py"):
        shutil.copy(EXAMPLES / name, tmp_path)
    config = json.loads((EXAMPLES / "config.json").read_text())
    config["parameters"] |= {
        "mxnet.rendezvous": f"eth0:{network.hosts[0].address}:29500",
        "exp.model": "resnet18",
        "exp.replica_batch": 1,
        "exp.num_batches": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_credentials(tmp_path / "credentials", Credentials.create())
    environment = {**commands, "ECHELON_CREDENTIALS_FILE": str(tmp_path / "credentials")}
    outputs = run_on_both(network, {"h1": ["./run", "0"], "h2": ["./run", "1"]}, environment, tmp_path)
    for rank, output in enumerate(outputs):
        assert f"[worker {rank}] INFO:root:Epoch[0] Time cost=" in output


def test_node_0_on_the_wrong_host_gives_one_line(network: Network, tmp_path: Path) -> None:
    address = network.hosts[0].address
    words = ["node", "0", "--num-nodes", "2", "--rendezvous", f"{address}:29500", "--", "true"]
    done = network["h2"].run([sys.executable, "-m", "echelon", *words], check=False)
    assert done.returncode == 2
    assert f"the rendezvous {address}:29500 is not on this machine" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_script_of_a_scheme_over_ssh(network: Network, commands: dict[str, str], tmp_path: Path) -> None:
    make_data(tmp_path / "tiny")
    addresses = [host.address for host in network.hosts]
    hosts = network.write_hosts_file(*addresses)
    (tmp_path / "groups").write_text("\n".join(addresses))
    (tmp_path / "data_sharding").write_text("0 0.3\n0.3 1\n")
    settings = {
        "NUM_WORKERS": "2",
        "NUM_SERVERS": "2",
        "HOSTS": str(hosts),
        "DATA_DIR": str(tmp_path / "tiny" / "data"),
        "GROUPS_FILE": str(tmp_path / "groups"),
        "DATA_SHARDING": str(tmp_path / "data_sharding"),
        "NUM_EPOCHS": "1",
        "NUM_EXAMPLES": "16",
    }
    done = network.login.run(
        [str(EXAMPLES / "gsp_mnist_mlp.sh")],
        environment={**commands, **settings},
        check=False,
        timeout_s=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in (0, 1):
        assert f"[worker {rank}] INFO:root:Epoch[0] Train-accuracy=" in done.stdout


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
