"""`echelon doctor` on real hosts: each defect is named with its host, in time, and nothing is left running."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import Network, make_hosts

pytestmark = pytest.mark.system


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with make_hosts(tmp_path, 2, networks=2) as network:
        network.write_hosts_file()
        yield network
        network.assert_nothing_runs()


def doctor(network: Network, *words: str) -> tuple[int, list[str]]:
    command = [sys.executable, "-m", "echelon", "doctor", "-H", str(network.disk / "hosts"), *words]
    done = network.login.run(command, check=False, timeout_s=60)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout.splitlines()


def test_healthy_hosts(network: Network) -> None:
    status, lines = doctor(network, "-i", "eth0")
    assert status == 0, lines
    assert lines[0].startswith("h1: Python ")
    assert lines[0].endswith("address 10.77.0.1")
    assert re.fullmatch(r"h1 +- +[\d.]+ [GM]B/s, [\d.]+ ms", lines[3])
    assert lines[-1] == "no problems found"


def test_what_is_wrong_is_named_with_its_host(network: Network, tmp_path: Path) -> None:
    network.write_hosts_file("h1", "h2", "nosuch", "root@h2:2222")
    program = (
        "import socket, signal; s = socket.create_server(('10.77.0.1', 29500)); print(1, flush=True); signal.pause()"
    )
    with network["h1"].start([sys.executable, "-c", program]) as taken:
        assert taken.stdout is not None
        taken.stdout.readline()
        status, lines = doctor(network, "--port", "29500")
        taken.kill()
    text = "\n".join(lines)
    assert status == 1
    assert "error: h1: port 29500 cannot be used there: Address already in use; end the program" in text
    assert "error: root@h2:2222: h2 runs no ssh server at this port" in text
    assert "error: nosuch: the host name nosuch is unknown" in text
    assert "warning: h1: it has 2 addresses (eth0 10.77.0.1, eth1 10.77.1.1), and the job would use 10.77.0.1" in text


def test_a_password_prompt_and_a_missing_interface(network: Network) -> None:
    network["h2"].authorized_keys.write_text("")
    status, lines = doctor(network, "-i", "eth7")
    text = "\n".join(lines)
    assert status == 1
    assert "error: h2: h2 does not let this user log in without a password: Permission denied" in text
    assert "error: h1: network interface 'eth7' has no IPv4 address" in text
