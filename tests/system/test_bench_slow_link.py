"""The slow link of `echelon bench schemes`: it limits the rate, and nothing is left of it however the command ends."""

from __future__ import annotations

import argparse
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from echelon.bench.schemes.link import slow_link
from echelon.bench.schemes.measure import measure
from echelon.errors import JobError
from jobs import until

pytestmark = pytest.mark.system

BYTES = 400_000
BURST = 64_000  # what tc lets through at once, generously
SEND = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2]))).sendall(bytes(int(sys.argv[3])))"


def interfaces() -> set[str]:
    return {name for _, name in socket.if_nameindex()}


def test_bytes_behind_the_link_arrive_at_its_rate() -> None:
    before = interfaces()
    with slow_link("4mbit") as link, socket.create_server((link.address, 0)) as server:
        assert len(interfaces() - before) == 1
        port = str(server.getsockname()[1])
        command = link.command([sys.executable, "-c", SEND, link.address, port, str(BYTES)])
        with subprocess.Popen(command) as sender, server.accept()[0] as stream:
            began = time.monotonic()
            received = 0
            while data := stream.recv(1 << 16):
                received += len(data)
            seconds = time.monotonic() - began
        assert sender.returncode == 0
    assert received == BYTES
    assert seconds > (BYTES - BURST) * 8 / 4e6
    assert interfaces() == before


def test_a_rate_that_tc_does_not_know_leaves_nothing_behind() -> None:
    before = interfaces()
    with pytest.raises(JobError, match="rate fast"), slow_link("fast"):
        pass
    assert interfaces() == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_benchmark_that_is_ended_removes_its_link(number: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "echelon", "bench", "schemes", "--case", "slow link", "--seeds", "1"]
    with subprocess.Popen([*command, "--json", str(tmp_path / "result.json")], stdout=subprocess.PIPE) as bench:
        until(lambda: f"echelon{bench.pid}" in interfaces(), "the link exists")
        bench.send_signal(number)
        bench.communicate(timeout=60)
    assert bench.returncode == (-number if number == signal.SIGKILL else 130)
    until(lambda: f"echelon{bench.pid}" not in interfaces(), "the link is gone")
    assert not (tmp_path / "result.json").exists()


def test_lock_step_waits_for_the_worker_behind_the_link_and_dist_async_does_not() -> None:
    args = argparse.Namespace(target=0.3, pace=0.05, lr=0.02, batch_size=16, limit_epochs=2)
    with slow_link("2mbit") as link:
        rates = {
            store: measure(args, "slow link", store, 0, link).samples_per_s for store in ("dist_sync", "dist_async")
        }
    assert rates["dist_async"] > 1.5 * rates["dist_sync"]
