"""A job on two hosts, a stranger on a third: it can neither read nor change anything, and the job goes on."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import pytest
from hosts import Host, Network, make_hosts

from echelon.environment import CREDENTIALS
from echelon.transport.admission.credentials import Credentials

pytestmark = pytest.mark.system

HERE = Path(__file__).parent
PORT = 9091
PATTERN = struct.pack("<4f", *[1.2345678] * 4)
CAPTURE = """
import socket, sys
sniffer = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
sniffer.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE
print("ready", flush=True)
sniffer.settimeout(0.2)
import select
data = []
while not select.select([sys.stdin], [], [], 0)[0]:
    try:
        data.append(sniffer.recv(1 << 17))
    except TimeoutError:
        pass
print(sum(map(len, data)), sum(bytes.fromhex(sys.argv[1]) in packet for packet in data))
"""


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with make_hosts(tmp_path, 2, sshd=False) as network:
        yield network


class Job:
    """A scheduler and a server on h1, a worker on h2. At the end of the block they must have ended."""

    def __init__(self, network: Network, folder: Path, **environment: str) -> None:
        self.opened = folder / "opened"
        self._network = network
        common = {"DMLC_PS_ROOT_URI": network["h1"].address, "DMLC_PS_ROOT_PORT": str(PORT), "DMLC_NUM_WORKER": "1"}
        common |= {"DMLC_NUM_SERVER": "1", "ECHELON_TRANSPORT": "tcp", "ECHELON_RUN_DIR": str(folder / "run")}
        self._environment = common | environment
        self.scheduler = self.start("h1", "scheduler", [sys.executable, "-m", "echelon.scheduler"])
        self.server = self.start("h1", "server", [sys.executable, "-m", "echelon.server"])
        self.worker = self.start("h2", "worker", [sys.executable, str(HERE / "secured_worker.py"), str(self.opened)])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for process in (self.scheduler, self.server, self.worker):
            process.kill()
            process.communicate()

    def start(self, host: str, role: str, command: list[str], **environment: str) -> subprocess.Popen[str]:
        return self._network[host].start(command, environment=self._environment | {"DMLC_ROLE": role} | environment)

    def wait_for_worker(self) -> None:
        assert self.worker.stdout is not None
        line = self.worker.stdout.readline()
        assert line == "waits\n", (line, self.worker.stderr and self.worker.stderr.read())

    def finish(self) -> dict[str, tuple[str, str]]:
        """Let the worker continue, and return what each process printed."""
        self.opened.touch()
        processes = {"scheduler": self.scheduler, "server": self.server, "worker": self.worker}
        printed = {name: process.communicate(timeout=60) for name, process in processes.items()}
        assert [process.returncode for process in processes.values()] == [0, 0, 0], printed
        return printed


def run(network: Network, folder: Path, **environment: str) -> None:
    folder.mkdir()
    with Job(network, folder, **environment) as job:
        job.wait_for_worker()
        job.finish()


def listening_ports_of(host: Host) -> set[int]:
    """Return the ports at which processes of a host listen, all of them at its own address."""
    lines = host.run(["ss", "-Hltn"]).stdout.splitlines()
    addresses = [line.split()[3].rpartition(":") for line in lines]
    assert {address for address, _, _ in addresses} == {host.address}, lines
    return {int(port) for _, _, port in addresses}


def new_credentials() -> dict[str, str]:
    return {CREDENTIALS: Credentials.create().to_text()}


@contextmanager
def captured(host: Host) -> Iterator[list[int]]:
    """Record all packets on the bridge meanwhile: the number of bytes, and of packets with weights in them."""
    counts: list[int] = []
    with host.start([sys.executable, "-c", CAPTURE, PATTERN.hex()], stdin=subprocess.PIPE) as sniffer:
        assert sniffer.stdout is not None
        assert sniffer.stdout.readline() == "ready\n"
        yield counts
        out, err = sniffer.communicate("stop\n", timeout=60)
        assert out, err
        counts += map(int, out.split())


def test_a_stranger_can_neither_read_nor_change_anything(network: Network, tmp_path: Path) -> None:
    with Job(network, tmp_path, **new_credentials()) as job:
        job.wait_for_worker()
        address = network["h1"].address
        (port,) = listening_ports_of(network["h1"]) - {PORT}
        tried = network.login.run([sys.executable, str(HERE / "stranger.py"), f"{address}:{PORT}", f"{address}:{port}"])
        outcomes = [line.partition(": ") for line in tried.stdout.splitlines()]
        assert len(outcomes) == 14, tried
        for name, _, outcome in outcomes:
            if name == "TLS without a certificate":
                assert outcome.startswith(("SSL", "Connection")), (name, outcome)  # the error of a closed connection
            elif name in ("no handshake", "messages after a hello", "messages after a hello of one machine"):
                assert int(outcome.removesuffix(" bytes")) <= 42, (name, outcome)  # at most the server's greeting
            else:
                assert outcome.startswith("ConnectionRefused: "), (name, outcome)
        printed = job.finish()
        (value,) = struct.unpack("<f", PATTERN[:4])
        assert printed["worker"][0] == f"weights [{value}]\n", "as the worker pushed them"
        for role in ("scheduler", "server"):
            (line,) = [line for line in printed[role][1].splitlines() if "refused a connection" in line]
            assert network.login.address in line, "a stranger is reported once, with its address"


def test_weights_are_not_readable_on_the_network(network: Network, tmp_path: Path) -> None:
    with captured(network.login) as encrypted:
        run(network, tmp_path / "tls", **new_credentials())
    with captured(network.login) as plain:
        run(network, tmp_path / "plain", ECHELON_SECURITY="proof", **new_credentials())
    assert encrypted[0] > 80_000 < plain[0], "all packets were recorded"
    assert encrypted[1] == 0
    assert plain[1] > 0, "the test finds weights that are not encrypted"


def test_other_credentials_give_one_line_on_both_sides(network: Network, tmp_path: Path) -> None:
    with Job(network, tmp_path, **new_credentials()) as job:
        job.wait_for_worker()
        command = [sys.executable, str(HERE / "secured_worker.py"), str(job.opened)]
        stranger = job.start("h2", "worker", command, **new_credentials())
        _, err = stranger.communicate(timeout=60)
        assert stranger.returncode == 1
        (line,) = err.splitlines()
        assert "the credentials of the two processes differ" in line
        assert "copy ~/.config/echelon/credentials" in line
        printed = job.finish()
        assert printed["scheduler"][1].count("the credentials of the two processes differ") == 1
