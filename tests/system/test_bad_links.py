"""Far workers behind links that lose packets, slow readers and half-open connections: they hold up nobody else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import Network, make_hosts
from link_jobs import FOLDER, HEARTBEAT_TIMEOUT_S, LinkJob
from link_worker import Work
from lossy_line import LineQuality
from relay import BAD, WORSE, join_by_relay

from leaks import listening_ports, ports_connected_to

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

GOOD = LineQuality()
NEAR_CLOCKS, FAR_CLOCKS = 150, 12
NOTICED_S = HEARTBEAT_TIMEOUT_S + 6.0  # to notice that a peer is silent, and to connect and ask again
LAST = 100  # clocks whose rate is compared, when all workers have begun


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with make_hosts(tmp_path, 2, sshd=False) as network:
        yield network


def weights_of_training(network: Network, folder: Path, quality: LineQuality) -> set[str]:
    """Train with one worker on each host; return the digests of the final weights."""
    h1, h2 = network.hosts
    with join_by_relay([h1, h2], quality) as relay, LinkJob(folder, 2) as job:
        job.start_on(h1, "scheduler 0")
        job.start_on(h1, "server 0")
        for rank, host in enumerate([h1, h2]):
            job.start_on(host, f"worker {rank}", [str(FOLDER / "training_worker.py")])
        job.assert_succeeded()
        assert all(line.lost > 0 for line in relay.counts()) == (quality.loss > 0), relay.counts()
        return {re.findall(r"has weights (\w+)", job.out(f"worker {rank}"))[0] for rank in range(2)}


def test_loss_and_delay_do_not_change_a_bit_under_dist_sync(network: Network, tmp_path: Path) -> None:
    digests = [
        weights_of_training(network, tmp_path / name, quality)
        for name, quality in (("good", GOOD), ("bad", BAD), ("worse", WORSE))
    ]
    assert len(set.union(*digests)) == 1, digests


def check_slow_worker(network: Network, folder: Path, slow: Work, *, is_far: bool) -> None:
    """Run two near workers under dist_async beside a slow one, which must not hold them up. Every push counts once.

    A worker that is held up has the rate of the slow one, so how busy this machine is makes no difference.
    """
    h1, h2 = network.hosts
    near = Work("dist_async", NEAR_CLOCKS, NEAR_CLOCKS, 3)
    with LinkJob(folder, 3) as job:
        job.start_on(h1, "scheduler 0")
        job.start_on(h1, "server 0")
        for rank in range(2):
            job.start_worker(h1, rank, near)
        job.start_worker(h2 if is_far else h1, 2, slow)
        job.assert_succeeded(120.0)
        *rates, slow_rate = (job.rate(rank, last) for rank, last in ((0, LAST), (1, LAST), (2, slow.clocks)))
        for rank in range(3):
            assert job.pushes_applied(rank) == [
                [1] * NEAR_CLOCKS,
                [1] * NEAR_CLOCKS,
                [1] * slow.clocks + [0] * (NEAR_CLOCKS - slow.clocks),
            ]
        assert min(rates) > 3 * slow_rate, (rates, slow_rate)


@pytest.mark.parametrize("quality", [pytest.param(BAD, id="1% loss"), pytest.param(WORSE, id="5% loss")])
def test_a_lossy_link_holds_up_nobody_else_and_loses_nothing(
    network: Network, tmp_path: Path, quality: LineQuality
) -> None:
    far = Work("dist_async", FAR_CLOCKS, NEAR_CLOCKS, 3)
    with join_by_relay(network.hosts, quality) as relay:
        check_slow_worker(network, tmp_path / "job", far, is_far=True)
        assert all(line.lost for line in relay.counts()), relay.counts()


def test_a_slow_reader_holds_up_nobody_else_and_loses_nothing(network: Network, tmp_path: Path) -> None:
    """It reads 100 kB per second, and a pull is half a megabyte."""
    slow = Work("dist_async", 4, NEAR_CLOCKS, 3, read_bytes_per_s=100e3)
    with join_by_relay(network.hosts, GOOD):
        check_slow_worker(network, tmp_path / "job", slow, is_far=False)


@pytest.mark.parametrize("waits_for", ["the answer to its push", "nothing"])
def test_a_half_open_data_connection_is_replaced(network: Network, tmp_path: Path, waits_for: str) -> None:
    """A firewall forgets the connection between the far worker and the server, and lets new ones pass.

    The far worker then waits for the server, or computes for so long that only the server notices.
    """
    h1, h2 = network.hosts
    with join_by_relay([h1, h2], LineQuality(delay_s=0.005)) as relay, LinkJob(tmp_path / "job", 2) as job:
        job.start_on(h1, "scheduler 0")
        job.start_on(h1, "server 0")
        long_s = 12.0 if waits_for == "nothing" else 0.1
        job.start_worker(h1, 0, Work("dist_sync", 20, 20, 2, pace_s=0.1))
        job.start_worker(h2, 1, Work("dist_sync", 20, 20, 2, pace_s=0.1, long_at=10, long_s=long_s))
        job.wait_for_clock(1, 10)
        (server_port,) = listening_ports(job.processes["server 0"].pid)
        data_ports = ports_connected_to(job.processes["worker 1"].pid, server_port)
        assert data_ports
        relay.block(data_ports)
        job.assert_succeeded(60.0)
        assert any(line.blocked for line in relay.counts())
        assert job.longest_pause(0) < NOTICED_S + long_s
        assert job.pushes_applied(0) == job.pushes_applied(1) == [[1] * 20] * 2
