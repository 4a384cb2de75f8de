"""Jobs on two hosts over ssh, with a real sshd on each: the same results as on one machine, and every failure named."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
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


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with make_hosts(tmp_path, 2) as network:
        network.write_hosts_file()
        yield network
        network.assert_nothing_runs(within_s=40.0)


def launch(network: Network, *words: str, workers: int = 2, servers: int = 0) -> list[str]:
    command = [sys.executable, "-m", "echelon", "launch", "-n", str(workers), "-s", str(servers), "--launcher", "ssh"]
    return [*command, "-H", str(network.disk / "hosts"), *words]


def run(network: Network, *words: str, workers: int = 2, servers: int = 0) -> subprocess.CompletedProcess[str]:
    return network.login.run(launch(network, *words, workers=workers, servers=servers), check=False, timeout_s=100)


def error_of(network: Network, *words: str) -> str:
    """Run a job that must fail, and return its last line."""
    done = run(network, *words, "--", *WAITING)
    assert done.returncode not in (0, 130), done
    return done.stderr.splitlines()[-1]


def weights_of(text: str) -> dict[str, tuple[str, str]]:
    """Return the address of each worker and the digest of its weights."""
    return {rank: (host, digest) for rank, host, digest in WEIGHTS.findall(text)}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(network: Network, check: Check) -> None:
    words = ["--launcher", "ssh", "-H", str(network.disk / "hosts")]
    check(LauncherTrial(words, network.login.prefix(), network.login.variables))


def test_the_weights_are_those_of_one_machine_bit_for_bit(network: Network) -> None:
    over_ssh = weights_of(run(network, "--", *TRAINING, servers=2).stdout)
    command = [sys.executable, "-m", "echelon", "launch", "-n", "2", "-s", "2", "--", *TRAINING]
    local = weights_of(network.login.run(command, timeout_s=100).stdout)
    assert {rank: host for rank, (host, _) in over_ssh.items()} == {"0": "10.77.0.1", "1": "10.77.0.2"}
    digests = {digest for _, digest in [*over_ssh.values(), *local.values()]}
    assert len(digests) == 1, (over_ssh, local)
    assert len(over_ssh) == len(local) == 2


def test_the_interface_is_chosen_on_every_host(tmp_path: Path) -> None:
    with make_hosts(tmp_path, 2, networks=2) as network:
        network.write_hosts_file()
        done = run(network, "-i", "eth1", "--", *TRAINING, servers=1)
        assert {host for host, _ in weights_of(done.stdout).values()} == {"10.77.1.1", "10.77.1.2"}, done
        missing = error_of(network, "-i", "eth7")
        network.assert_nothing_runs()
    assert "eth7" in missing


def test_a_hosts_file_has_users_ports_slots_and_comments(network: Network) -> None:
    network.write_hosts_file("# two machines", "root@h2:22 slots=2", "h1  # the old one")
    done = run(network, "--", "hostname", workers=3)
    assert sorted(done.stdout.splitlines()) == ["[worker 0] h2", "[worker 1] h2", "[worker 2] h1"], done


def test_a_login_shell_may_print_and_python_is_the_same_as_the_agents(network: Network) -> None:
    (network["h1"].own / ".bashrc").write_text("echo Welcome!; PATH=/usr/bin\n")
    done = run(network, "--", "python", "-c", "import sys; print(sys.executable)")
    python = Path(sys.executable).with_name("python")  # this process may run as python3 of the same folder
    assert sorted(done.stdout.splitlines()) == [f"[worker {rank}] {python}" for rank in range(2)], done


def test_a_copied_folder_is_the_working_directory_of_the_job(network: Network) -> None:
    work = network.login.own / "work"
    work.mkdir()
    (work / "train.py").write_text("import os; print(os.getcwd(), os.path.exists('data'))")
    (work / "data").touch()
    words = ["--sync-dst-dir", f"{network.disk}/copy", "--ssh-exclude", "data", "--", "python", "train.py"]
    done = network.login.run(launch(network, *words), cwd=network.disk / "work")
    assert sorted(done.stdout.splitlines()) == [f"[worker {rank}] {network.disk}/copy False" for rank in range(2)]


def test_a_working_directory_that_a_host_does_not_have_is_named(network: Network) -> None:
    (network.login.own / "work").mkdir()
    (network["h1"].own / "work").mkdir()
    words = launch(network, "--", *WAITING)
    done = network.login.run(words, cwd=network.disk / "work", check=False)
    assert f"worker 1 (on h2) cannot start: the folder {network.disk}/work cannot be used: " in done.stderr


def test_training_needs_a_run_folder_that_all_hosts_share(network: Network) -> None:
    """`echelon train` reads what workers write. A folder of the same name on a host is not the launcher's."""
    for host in network.hosts:
        (host.own / "runs" / "name").mkdir(parents=True)
    command = [sys.executable, "-m", "echelon", "train", "--demo", "-n", "1", "-s", "1", "--name", "name"]
    words = [*command, "--launcher", "ssh", "-H", "hosts"]
    done = network.login.run(words, check=False)
    assert done.returncode == 127, done
    assert (
        "cannot start: the run folder runs/name is not on a disk that this host shares with the launcher" in done.stderr
    )


def test_a_password_prompt_is_an_error_at_once(network: Network) -> None:
    network["h2"].authorized_keys.write_text("")
    error = error_of(network)
    assert "h2 does not let this user log in without a password: Permission denied" in error
    assert "ssh-copy-id h2" in error


@pytest.mark.parametrize("servers", [0, 1])
def test_a_host_that_cannot_be_reached_is_named_before_anything_starts(network: Network, servers: int) -> None:
    """A job with servers could go on without a worker that fails, but not from the beginning."""
    network.write_hosts_file("h1", *["h2"][:servers], "10.77.0.99")
    began = time.monotonic()
    done = run(network, "--ssh-option", "ConnectTimeout=2", "--", *WAITING, servers=servers)
    assert done.stdout == ""
    assert "worker 1 (on 10.77.0.99) cannot start: 10.77.0.99 cannot be reached: " in done.stderr
    assert done.returncode == 255
    assert time.monotonic() - began < 15


def test_a_port_without_sshd_is_named(network: Network) -> None:
    network.write_hosts_file("h1", "h2:23")
    assert "h2 runs no ssh server at this port: Connection refused" in error_of(network)


def test_an_unknown_host_key_is_named(network: Network) -> None:
    known = network.login.folder / "ssh" / "known_hosts"
    known.write_text(known.read_text().replace("h2,", ""))
    assert "the host key of h2 is unknown; log in once to accept it: ssh h2" in error_of(network)


def test_a_missing_module_on_one_host_is_named(network: Network) -> None:
    h2 = network["h2"]
    find = [sys.executable, "-P", "-c", "import echelon.launch; print(echelon.launch.__path__[0])"]
    while place := h2.run(find, check=False).stdout.strip():  # in this folder, and where it may be installed
        h2.hide(Path(place).parents[1])
    assert f"Python of h2 ({sys.executable}) has no module echelon" in error_of(network)


def test_a_missing_python_on_one_host_is_named(network: Network) -> None:
    (network["h1"].own / "python").symlink_to(sys.executable)
    error = error_of(network, "--ssh-python", f"{network.disk}/python")
    assert f"h2 cannot run {network.disk}/python: not found" in error


def test_other_code_on_one_host_is_named_before_anything_starts(network: Network) -> None:
    network["h2"].remove(REPOSITORY / "src" / "echelon" / "__main__.py")
    done = run(network, "--", *WAITING)
    assert "worker 1 (on h2) cannot start: its Echelon has other code" in done.stderr, done
    assert "waits" not in done.stdout


def test_without_restarts_a_killed_server_ends_the_job_everywhere(network: Network) -> None:
    job = network.login.start(
        launch(network, "--max-restarts", "0", "--", *TRAINING[:1], "-u", "-c", _WAITS_WITH_STORE, servers=2)
    )
    assert job.stdout is not None
    for _ in range(2):
        job.stdout.readline()
    server = next(pid for pid, command in network["h2"].processes().items() if "echelon.server" in command)
    os.kill(server, signal.SIGKILL)
    _, err = job.communicate(timeout=60)
    assert job.returncode == 128 + signal.SIGKILL
    assert re.search(r"server 1 \(pid \d+ on h2\) was killed by signal 9", err), err


_WAITS_WITH_STORE = """
import signal
from echelon import kvstore
kv = kvstore.create("dist_sync")
print("waits")
signal.pause()
"""


def test_a_host_that_vanishes_is_named(network: Network) -> None:
    """Its processes end, too, when the network is back."""
    words = ["--ssh-option", "ServerAliveInterval=1", "--ssh-option", "ServerAliveCountMax=2"]
    job = network.login.start(launch(network, *words, "--", *WAITING))
    assert job.stdout is not None
    for _ in range(2):
        job.stdout.readline()
    network["h2"].set_link(up=False)
    _, err = job.communicate(timeout=30)
    assert job.returncode == 255
    assert re.search(r"worker 1 \(pid \d+ on h2\) was lost: h2 has stopped answering", err), err
    until(lambda: not network["h1"].processes(), "the processes of h1 have ended", 5.0)
    network["h2"].set_link(up=True)


def test_more_processes_than_sshd_lets_log_in_at_once(network: Network) -> None:
    h1 = network["h1"]
    assert h1.sshd is not None
    h1.sshd.close()
    h1.start_sshd("MaxStartups 9:100:9")  # by default, sshd refuses some of more than ten at random
    network.write_hosts_file("h1 slots=12")
    done = run(network, "--", "true", workers=12)
    assert done.returncode == 0, done
