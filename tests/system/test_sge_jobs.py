"""Jobs under a real Grid Engine with two hosts."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import Network, make_hosts
from sge_cluster import Sge, start_sge

from echelon.testing.launcher import CHECKS, Check, LauncherTrial
from jobs import until

pytestmark = pytest.mark.system

TRAINING = [sys.executable, str(Path(__file__).with_name("training_worker.py"))]
WEIGHTS = re.compile(r"worker (\d) on (\S+) has weights (\w+)")
TIMEOUT_S = 100.0


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with make_hosts(tmp_path_factory.mktemp("sge"), 2, sshd=False) as network:
        yield network


@pytest.fixture(scope="module")
def cluster(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sge]:
    with start_sge(network, tmp_path_factory.mktemp("cluster")) as sge:
        yield sge


@pytest.fixture
def sge(cluster: Sge, tmp_path: Path) -> Iterator[Sge]:
    """The cluster, on which a test leaves no job and no file."""
    yield cluster
    until(lambda: not cluster.jobs(), "no job is left")
    assert not list(tmp_path.glob("echelon-*"))


def launch(*words: str, workers: int = 2, servers: int = 0) -> list[str]:
    return [sys.executable, "-m", "echelon", "launch", "-n", str(workers), "-s", str(servers), *words]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(network: Network, sge: Sge, check: Check, tmp_path: Path) -> None:
    environment = {**network.login.variables, **sge.variables}
    words = ["--launcher", "sge", "--sge-log-dir", str(sge.folder)]
    check(LauncherTrial(words, network.login.prefix(tmp_path), environment))


def test_the_weights_are_those_of_one_machine_bit_for_bit(sge: Sge, tmp_path: Path) -> None:
    words = launch("--launcher", "sge", "--", *TRAINING, servers=2)
    done = sge.login.run(words, environment=sge.variables, cwd=tmp_path, timeout_s=TIMEOUT_S)
    by_sge = WEIGHTS.findall(done.stdout)
    local = WEIGHTS.findall(sge.run(launch("--", *TRAINING, servers=2), timeout_s=TIMEOUT_S).stdout)
    assert [rank for rank, _, _ in sorted(by_sge)] == ["0", "1"]
    assert {host for _, host, _ in by_sge} <= {"10.77.0.1", "10.77.0.2"}
    assert len({digest for _, _, digest in [*by_sge, *local]}) == 1, (by_sge, local)
    assert len(local) == 2


def test_ctrl_c_deletes_a_job_that_waits(sge: Sge, tmp_path: Path) -> None:
    words = launch("--launcher", "sge", "--sge-args=-h", "--", "true")
    launcher = sge.login.start(words, environment=sge.variables, cwd=tmp_path)
    until(sge.jobs, "the job waits")
    launcher.send_signal(signal.SIGINT)
    out, err = launcher.communicate(timeout=TIMEOUT_S)
    assert launcher.returncode == 128 + signal.SIGINT, (out, err)


def test_no_user_sees_the_credentials(sge: Sge, tmp_path: Path) -> None:
    """`qstat -j` shows the environment of a job to every user."""
    words = launch("--launcher", "sge", "--sge-args=-h", "--", "true")
    launcher = sge.login.start(words, environment=sge.variables, cwd=tmp_path)
    until(sge.jobs, "the job waits")
    shown = sge.run(["qstat", "-j", "*"]).stdout
    (secret,) = tmp_path.glob("echelon-*/credentials")
    assert "ECHELON_HUB=" in shown
    assert secret.read_text()[:40] not in shown
    assert secret.stat().st_mode & 0o077 == 0
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=TIMEOUT_S)
