"""Jobs on two hosts under the real mpirun of Open MPI and of MPICH, with a real sshd on each host."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import Network, make_hosts

from echelon.testing.launcher import CHECKS, Check, LauncherTrial

pytestmark = pytest.mark.system

TRAINING = [sys.executable, str(Path(__file__).with_name("training_worker.py"))]
WAITING = [sys.executable, "-u", "-c", "import signal; print('waits'); signal.pause()"]
WEIGHTS = re.compile(r"worker (\d) on (\S+) has weights (\w+)")
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
PROGRAMS = ("mpirun.openmpi", "mpirun.mpich")


@pytest.fixture(params=PROGRAMS)
def mpirun(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with make_hosts(tmp_path, 2) as network:
        network.write_hosts_file()
        network.login.variables |= AS_ROOT
        yield network
        network.assert_nothing_runs(within_s=40.0)


def launch(network: Network, mpirun: str, *words: str, workers: int = 2, servers: int = 0) -> list[str]:
    command = [sys.executable, "-m", "echelon", "launch", "-n", str(workers), "-s", str(servers), "--launcher", "mpi"]
    return [*command, "--mpi-program", mpirun, "-H", str(network.disk / "hosts"), *words]


def run(
    network: Network, mpirun: str, *words: str, workers: int = 2, servers: int = 0
) -> subprocess.CompletedProcess[str]:
    command = launch(network, mpirun, *words, workers=workers, servers=servers)
    return network.login.run(command, check=False, timeout_s=100)


def weights_of(text: str) -> dict[str, tuple[str, str]]:
    """Return the address of each worker and the digest of its weights."""
    return {rank: (host, digest) for rank, host, digest in WEIGHTS.findall(text)}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(network: Network, mpirun: str, check: Check) -> None:
    words = ["--launcher", "mpi", "--mpi-program", mpirun, "-H", str(network.disk / "hosts")]
    check(LauncherTrial(words, network.login.prefix(), network.login.variables))


def test_the_weights_are_those_of_one_machine_bit_for_bit(network: Network, mpirun: str) -> None:
    by_mpi = weights_of(run(network, mpirun, "--", *TRAINING, servers=2).stdout)
    command = [sys.executable, "-m", "echelon", "launch", "-n", "2", "-s", "2", "--", *TRAINING]
    local = weights_of(network.login.run(command, timeout_s=100).stdout)
    assert {rank: host for rank, (host, _) in by_mpi.items()} == {"0": "10.77.0.1", "1": "10.77.0.2"}
    digests = {digest for _, digest in [*by_mpi.values(), *local.values()]}
    assert len(digests) == 1, (by_mpi, local)
    assert len(by_mpi) == len(local) == 2
