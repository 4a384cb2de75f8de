"""The instructions of MXNet-G, DLBS and MXNet, followed to the letter on hosts with disks of their own.

Seed 001: keys, scp_mxnet.py, data_sharding, groups, a script per scheme. Seed 002: ./run RANK on each node. Seed 003:
dmlc_ssh.py in a working directory, and dmlc_mpi.py on a shared disk. Only the data and the networks are small.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import REPOSITORY, Host, Network, make_hosts

from jobs import until
from tiny_data import make_data

pytestmark = pytest.mark.system

EXAMPLES = Path("examples") / "image-classification"
SMALL = {"NUM_EPOCHS": "1", "NUM_EXAMPLES": "32", "NUM_WORKERS": "2", "NUM_SERVERS": "2", "OMP_NUM_THREADS": "1"}
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
NOT_CHECKED_OUT = shutil.ignore_patterns(".*", "__pycache__", "runs", "build", "dist", "docs", "tests", "results")


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    """Two hosts. `login` has a checkout and data on its own disk, and all have its `echelon` and `python` in PATH."""
    with make_hosts(tmp_path / "network", 2, sshd=False) as network:
        checkout = network.login.own / "checkout"
        shutil.copytree(REPOSITORY, checkout, ignore=NOT_CHECKED_OUT)
        make_data(checkout / EXAMPLES)
        for host in [network.login, *network.hosts]:
            programs = host.own / "bin"
            programs.mkdir()
            for name, words in {"echelon": "-m echelon", "python": ""}.items():
                (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
                (programs / name).chmod(0o755)
            host.variables["PATH"] = f"{network.disk}/bin:{host.variables['PATH']}"
            host.variables["XDG_CONFIG_HOME"] = str(network.disk / ".config")  # the tests' own is another
            host.variables["PYTHONPATH"] = str(network.disk / "checkout" / "src")
        for host in network.hosts:
            host.start_sshd()
        yield network
        network.assert_nothing_runs(within_s=40.0)


def examples(host: Host) -> Path:
    """Return the folder of the examples on a host."""
    return host.disk / "checkout" / EXAMPLES


def write(host: Host, name: str, *lines: str) -> None:
    """Write a file of the examples on a host."""
    (host.own / "checkout" / EXAMPLES / name).write_text("".join(f"{line}\n" for line in lines))


def run(host: Host, *words: str, cwd: Path | None = None, **variables: str) -> str:
    """Run a command in the folder of the examples, and return what it prints."""
    done = host.run(words, cwd=cwd or examples(host), environment={**SMALL, **variables}, check=False, timeout_s=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def copy_to_hosts(network: Network) -> list[str]:
    """Follow steps 1 and 2 of seed 001, and return the addresses in the hosts file."""
    addresses = [host.address for host in network.hosts]
    write(network.login, "hosts", *addresses)
    run(network.login, "python", "scp_mxnet.py")
    return addresses


def test_the_five_steps_of_seed_001(network: Network) -> None:
    """The files of steps 3 and 4 are written after the copy of step 2, so only the launching machine has them."""
    login = network.login
    addresses = copy_to_hosts(network)
    write(login, "data_sharding", "0 0.3", "0.3 1")
    write(login, "groups", *reversed(addresses))
    gsp = run(login, "./gsp_cifar10_inception_small.sh", BATCH_SIZE="4")
    assert gsp.count("data_allocator=1, data_sharding='0.0 0.3/0.3 1.0'") == 2
    outputs = [gsp, run(login, "./ssp_mnist_mlp.sh", DATA_ALLOCATOR="1")]
    for output in outputs:
        for rank in (0, 1):
            assert f"[worker {rank}] INFO:root:Epoch[0] Train-accuracy=" in output
    assert not (network.hosts[0].own / "checkout" / EXAMPLES / "groups").exists()


def test_the_two_nodes_of_seed_002(network: Network) -> None:
    copy_to_hosts(network)
    first, second = network.hosts
    for host in network.hosts:
        config = json.loads((host.own / "checkout" / EXAMPLES / "config.json").read_text())
        small = {"exp.model": "resnet18", "exp.replica_batch": 1, "exp.num_batches": 1}
        config["parameters"] |= {"mxnet.rendezvous": f"eth0:{first.address}:29500", **small}
        write(host, "config.json", json.dumps(config))
    secret = ".config/echelon/credentials"
    with first.start(["./run", "0"], cwd=examples(first), environment=SMALL, stderr=subprocess.STDOUT) as node_0:
        try:
            until((first.own / secret).is_file, "node 0 has made the credentials")
            (second.own / secret).parent.mkdir(parents=True)
            shutil.copy2(first.own / secret, second.own / secret)  # in place of the scp of docs/how-to/security.md
            outputs = [run(second, "./run", "1"), node_0.communicate(timeout=100)[0]]
        finally:
            node_0.terminate()
    assert node_0.returncode == 0, outputs
    for rank, output in zip((1, 0), outputs, strict=True):
        assert "ms per batch" in output, output
        log = (network.hosts[rank].own / "checkout" / EXAMPLES / "logs" / f"rank_{rank}.log").read_text()
        assert '__exp.status__="ok"' in log


def test_the_two_commands_of_seed_003(network: Network) -> None:
    """The working directory has a copy of the library, and the hosts get it from there."""
    login = network.login
    login.variables |= AS_ROOT
    working = login.own / "working_dir"
    shutil.copytree(login.own / "checkout" / "src" / "echelon", working / "echelon")
    shutil.copytree(login.own / "checkout" / EXAMPLES / "data", working / "data")
    for path in (login.own / "checkout" / EXAMPLES).glob("*.py"):
        shutil.copy(path, working)
    (working / "hosts").write_text("".join(f"{host.address}\n" for host in network.hosts))
    words = ["-n", "2", "-s", "2", "-H", "hosts", "python", "dist_sync_mlp.py", "--num-epochs", "1"]
    words += ["--num-examples", "32"]
    for host in network.hosts:  # no Echelon but that of the working directory
        assert not (host.own / "checkout").exists()
        shutil.copytree(working, host.own / "working_dir")
    folder = network.disk / "working_dir"
    by_ssh = run(login, str(network.disk / "checkout" / "tracker" / "dmlc_ssh.py"), *words, cwd=folder)
    copy_to_hosts(network)  # instead of a shared disk
    by_mpi = run(login, "../../tracker/dmlc_mpi.py", *words)
    for output in (by_ssh, by_mpi):
        for rank in (0, 1):
            assert f"[worker {rank}] INFO:root:Epoch[0] Train-accuracy=" in output
