"""Cuts of the network between the hosts of a job: the near side goes on, and the far side says what it waits for."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import Network, make_hosts
from link_jobs import FOLDER, HEARTBEAT_TIMEOUT_S, STALL_SECONDS, LinkJob
from link_worker import Work
from lossy_line import LineQuality
from relay import ADDRESSES, Relay, join_by_relay

from jobs import until

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

LINK = LineQuality(delay_s=0.005)
GOES_ON_S = HEARTBEAT_TIMEOUT_S + 2.0
SAYS_S = HEARTBEAT_TIMEOUT_S + STALL_SECONDS + 4.0
GIVES_UP_S = 40.0  # ECHELON_TIMEOUT of these jobs: how long a process tries to reach the scheduler again
ENDS_S = HEARTBEAT_TIMEOUT_S + GIVES_UP_S + 10.0
CUT_S = 8.0  # more than three heartbeats
REJOINS_S = 30.0
CLOCKS, CUT_AT = 100, 20


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with make_hosts(tmp_path, 2, sshd=False) as network:
        yield network


@pytest.fixture
def relay(network: Network) -> Iterator[Relay]:
    with join_by_relay(network.hosts, LINK) as relay:
        yield relay


def waits_for_the_scheduler(job: LinkJob, name: str) -> bool:
    scheduler = re.escape(ADDRESSES[0])
    return bool(re.search(rf"has waited \d+\.\d s for the scheduler at {scheduler}:\d+ ", job.out(name)))


def names_the_server(job: LinkJob, name: str) -> bool:
    """Return whether a process has ended because of the lost server, or says that it waits for its slice."""
    if job.processes[name].poll():
        return "server 1" in job.out(name)
    waits = r"has waited .*(no server stores slice 1 now|the server of slice 1 at \S+ has not answered)"
    return bool(re.search(waits, job.out(name)))


def assert_ends_and_names_the_scheduler(job: LinkJob, name: str, within_s: float) -> None:
    status = job.processes[name].wait(within_s)
    assert status not in (0, None), job.out(name)
    assert f"no connection to the scheduler at {ADDRESSES[0]}:" in job.out(name), job.out(name)


@pytest.mark.parametrize(
    ("store", "lines"),
    [
        pytest.param("dist_sync", (), id="dist_sync"),
        pytest.param("dist_sync", (1,), id="from the far host only"),
        pytest.param("dist_async", (), id="dist_async"),
    ],
)
def test_a_worker_is_cut_off(
    network: Network, relay: Relay, tmp_path: Path, store: str, lines: tuple[int, ...]
) -> None:
    h1, h2 = network.hosts
    work = Work(store, CLOCKS, CLOCKS, 3, pace_s=0.1)
    with LinkJob(tmp_path / "job", 3, environment={"ECHELON_TIMEOUT": str(GIVES_UP_S)}) as job:
        job.start_on(h1, "scheduler 0")
        job.start_on(h1, "server 0")
        for rank, host in enumerate([h1, h1, h2]):
            job.start_worker(host, rank, work)
        job.wait_for_clock(0, CUT_AT)
        cut_at = time.time()
        relay.cut(*lines)
        until(lambda: job.longest_pause(0, after=cut_at) and len(job.clocks(0)) > 2 * CUT_AT, "goes on", 30.0)
        until(lambda: waits_for_the_scheduler(job, "worker 2"), f"it says so: {job.out('worker 2')}", SAYS_S)
        assert job.processes["worker 2"].wait(ENDS_S) != 0
        last = [line for line in job.out("worker 2").splitlines() if line.startswith("error: ")]
        assert re.search(rf"(the scheduler|the server of slice 0) at \S*{re.escape(ADDRESSES[0])}:", last[0]), last
        for name in ("worker 0", "worker 1", "server 0"):
            assert job.processes[name].wait(60.0) == 0, job.out(name)
        limit = GOES_ON_S if store == "dist_sync" else 1.0
        assert max(job.longest_pause(rank, after=cut_at) for rank in range(2)) < limit
        applied = job.pushes_applied(0)
        assert applied == job.pushes_applied(1)
        assert applied[:2] == [[1] * CLOCKS] * 2
        far = sum(applied[2])
        assert applied[2] == [1] * far + [0] * (CLOCKS - far), (
            "what the far worker pushed before the cut, and nothing twice"
        )
        assert far >= (CUT_AT - 5 if store == "dist_sync" else 1), "only in lock-step it is as far as the others"


def test_a_server_is_cut_off_whose_slice_has_a_backup(network: Network, relay: Relay, tmp_path: Path) -> None:
    h1, h2 = network.hosts
    work = Work("dist_sync", CLOCKS, CLOCKS, 2, pace_s=0.1)
    variables = {"ECHELON_TIMEOUT": str(GIVES_UP_S), "ECHELON_REPLICAS": "1"}
    with LinkJob(tmp_path / "job", 2, num_servers=2, environment=variables) as job:
        for host, name in ((h1, "scheduler 0"), (h1, "server 0"), (h2, "server 1")):
            job.start_on(host, name)
        for rank in range(2):
            job.start_worker(h1, rank, work)
        job.wait_for_clock(0, CUT_AT)
        cut_at = time.time()
        relay.cut()
        until(lambda: waits_for_the_scheduler(job, "server 1"), f"it says so: {job.out('server 1')}", SAYS_S)
        assert_ends_and_names_the_scheduler(job, "server 1", ENDS_S)
        for name in ("worker 0", "worker 1", "server 0"):
            assert job.processes[name].wait(60.0) == 0, job.out(name)
        assert max(job.longest_pause(rank, after=cut_at) for rank in range(2)) < GOES_ON_S + 3.0
        assert job.pushes_applied(0) == job.pushes_applied(1) == [[1] * CLOCKS] * 2


def test_a_server_is_cut_off_whose_slice_has_no_backup(network: Network, relay: Relay, tmp_path: Path) -> None:
    """Nobody starts it again here, so the near processes cannot go on. They name it; the far server ends."""
    h1, h2 = network.hosts
    work = Work("dist_sync", CLOCKS, CLOCKS, 2, pace_s=0.1)
    with LinkJob(tmp_path / "job", 2, num_servers=2, environment={"ECHELON_TIMEOUT": str(GIVES_UP_S)}) as job:
        for host, name in ((h1, "scheduler 0"), (h1, "server 0"), (h2, "server 1")):
            job.start_on(host, name)
        for rank in range(2):
            job.start_worker(h1, rank, work)
        job.wait_for_clock(0, CUT_AT)
        relay.cut()
        until(lambda: "server 1" in job.out("scheduler 0"), "the scheduler names the lost server", GOES_ON_S)
        for name in ("worker 0", "worker 1"):
            until(lambda: names_the_server(job, name), f"{name} names the server", SAYS_S)  # noqa: B023
        assert_ends_and_names_the_scheduler(job, "server 1", ENDS_S)
        for name in ("worker 0", "worker 1", "server 0", "scheduler 0"):
            assert job.processes[name].wait(90.0) != 0, job.out(name)
            assert "server 1" in job.out(name), job.out(name)


@pytest.mark.parametrize("store", ["dist_sync", "dist_async"])
def test_a_worker_that_was_cut_off_for_a_while_joins_again(
    network: Network, relay: Relay, tmp_path: Path, store: str
) -> None:
    """The cut is longer than three heartbeats, so that the others go on without the worker."""
    h1, h2 = network.hosts
    with LinkJob(tmp_path / "job", 3) as job:
        job.start_on(h1, "scheduler 0")
        job.start_on(h1, "server 0")
        for rank, host in enumerate([h1, h1, h2]):
            job.start_on(host, f"worker {rank}", [str(FOLDER / "healing_worker.py"), store, str(job.folder)])
        job.wait_for_clock(2, CUT_AT)
        cut_at = time.time()
        relay.cut()
        until(lambda: "worker 2 (pid" in job.out("scheduler 0"), "the scheduler removes the worker", GOES_ON_S)
        until(lambda: time.time() - cut_at > CUT_S, "the cut is over", CUT_S + 1.0)
        before = len(job.clocks(2))
        relay.heal()
        until(lambda: len(job.clocks(2)) > before + CUT_AT, "the far worker trains again", REJOINS_S)
        job.assert_succeeded(90.0)
        # Under dist_async, the others wait at the end of the epoch for the samples that the far worker has.
        assert max(job.longest_pause(rank, after=cut_at) for rank in range(2)) < GOES_ON_S
        assert len({re.findall(r"has weights (\w+)", job.out(f"worker {rank}"))[0] for rank in range(3)}) == 1
