"""Jobs on two hosts under the real mpirun of Open MPI and of MPICH, with a real sshd on each host."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import REPOSITORY, Network, make_hosts

from echelon.testing.launcher import CHECKS, Check, LauncherTrial
from jobs import until

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


def error_of(network: Network, mpirun: str) -> str:
    """Run a job that must fail before it starts, and return its last line."""
    done = run(network, mpirun, "--", *WAITING)
    assert done.returncode not in (0, 130), done
    assert "waits" not in done.stdout
    return done.stderr.splitlines()[-1]


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


def test_the_script_of_mxnet(network: Network, mpirun: str) -> None:
    """As in MXNet's documentation; mpirun stands for either implementation."""
    (network.login.own / "bin").mkdir()
    program = network.login.own / "bin" / "mpirun"
    program.write_text(f'#!/bin/sh\nexec {mpirun} "$@"\n')
    program.chmod(0o755)
    path = f"{network.disk}/bin:{network.login.variables['PATH']}"
    command = [str(REPOSITORY / "tracker" / "dmlc_mpi.py"), "-n", "2", "-s", "2", "-H", "hosts", "python", TRAINING[1]]
    done = network.login.run(command, check=False, timeout_s=100, environment={"PATH": path})
    assert len(weights_of(done.stdout)) == 2, done


def read_until_waiting(job: subprocess.Popen[str], num_workers: int) -> None:
    """Read the output until workers have said that they wait. mpirun may print warnings of its own between them."""
    assert job.stdout is not None
    for line in job.stdout:
        num_workers -= "waits" in line
        if not num_workers:
            return
    pytest.fail("the job has ended")


def test_without_restarts_a_killed_server_ends_the_job_everywhere(network: Network, mpirun: str) -> None:
    job = network.login.start(launch(network, mpirun, "--max-restarts", "0", "--", *WAITING, servers=2))
    read_until_waiting(job, 1)
    server = next(pid for pid, command in network["h2"].processes().items() if "echelon.server" in command)
    os.kill(server, signal.SIGKILL)
    _, err = job.communicate(timeout=60)
    assert job.returncode == 128 + signal.SIGKILL
    assert re.search(r"server 1 \(pid \d+ on h2\) was killed by signal 9", err), err


def test_the_death_of_an_agent_is_that_of_its_process(network: Network, mpirun: str) -> None:
    job = network.login.start(launch(network, mpirun, "--", *WAITING))
    read_until_waiting(job, 2)
    agent = next(pid for pid, command in network["h2"].processes().items() if "echelon.launch.agents.task" in command)
    os.kill(agent, signal.SIGKILL)
    _, err = job.communicate(timeout=60)
    assert job.returncode == 255
    assert re.search(r"worker 1 \(pid \d+ on h2\) was lost: its agent has disconnected", err), err


def test_ctrl_c_before_the_agents_have_connected(network: Network, mpirun: str) -> None:
    job = network.login.start(launch(network, mpirun, "--", *WAITING))
    until(lambda: any("mpirun" in command.split()[0] for command in network.login.processes().values()), "mpirun runs")
    job.send_signal(signal.SIGINT)
    _, err = job.communicate(timeout=60)
    assert (job.returncode, err) == (130, "echelon: stopped by SIGINT\n")


def test_a_password_prompt_is_an_error_at_once(network: Network, mpirun: str) -> None:
    network["h2"].authorized_keys.write_text("")
    error = error_of(network, mpirun)
    assert "worker 1 (on h2) cannot run" in error
    assert "h2 does not let this user log in without a password: Permission denied" in error


def test_a_host_that_cannot_be_reached_is_named(network: Network, mpirun: str) -> None:
    network.write_hosts_file("h1", "10.77.0.99")
    assert "10.77.0.99 cannot be reached: No route to host" in error_of(network, mpirun)


def test_a_missing_module_on_one_host_is_named(network: Network, mpirun: str) -> None:
    h2 = network["h2"]
    find = [sys.executable, "-P", "-c", "import echelon.launch; print(echelon.launch.__path__[0])"]
    while place := h2.run(find, check=False).stdout.strip():  # in this folder, and where it may be installed
        h2.hide(Path(place).parents[1])
    error = error_of(network, mpirun)
    assert "worker 1 (on h2) cannot run: a host has no Echelon for this Python" in error


def test_a_working_directory_that_a_host_does_not_have_is_named(network: Network, mpirun: str) -> None:
    (network.login.own / "work").mkdir()
    (network["h1"].own / "work").mkdir()
    done = network.login.run(launch(network, mpirun, "--", *WAITING), cwd=network.disk / "work", check=False)
    assert "worker 1 (on h2)" in done.stderr, done
    assert f"the folder {network.disk}/work cannot be used: No such file or directory" in done.stderr, done


def test_open_mpi_does_not_run_as_root(network: Network) -> None:
    for name in AS_ROOT:
        network.login.variables[name] = ""
    assert "mpirun of Open MPI refuses to run as root; use another user, or set OMPI_ALLOW_RUN_AS_ROOT=1" in error_of(
        network, "mpirun.openmpi"
    )
