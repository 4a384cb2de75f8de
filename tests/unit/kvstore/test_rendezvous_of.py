"""Where the process group of a store has its rendezvous, and the rank of each process in it."""

from __future__ import annotations

import dataclasses

import pytest

from echelon.environment import Job
from echelon.errors import UsageError
from echelon.kvstore.collective.rendezvous import Rounds, rendezvous_of_devices, rendezvous_of_store

WORKERS = Job(scheduler_host="head", scheduler_port=1, num_workers=3, rank=2, listen_fd=7)
DEVICES = Job(num_devices=2, device_index=1, device_port=2, device_fd=8, rank=4)


@pytest.mark.parametrize("name", ["dist_sync", "dist_device_sync", "dist_sync_device"])
def test_workers_meet_at_the_scheduler_address(name: str) -> None:
    found = rendezvous_of_store(name, WORKERS)
    assert found is not None
    assert (found.rank, found.size, found.address, found.listen_fd) == (2, 3, "head:1", 7)
    assert (found.names, found.is_host) == (["worker 0", "worker 1", "worker 2"], False)


def test_workers_of_a_job_with_servers_meet_at_a_port_that_the_scheduler_does_not_have() -> None:
    job = dataclasses.replace(WORKERS, num_servers=2, rendezvous_port=5)
    found = rendezvous_of_store("dist_device_sync", job)
    assert found is not None
    assert (found.address, found.listen_fd) == ("head:5", 7)
    with pytest.raises(UsageError, match=r"dist_device_sync runs without servers, but the job has 2.* at head:1: set "):
        rendezvous_of_store("dist_device_sync", dataclasses.replace(job, rendezvous_port=None))


def test_all_devices_of_all_workers_are_one_group() -> None:
    job = Job(scheduler_port=1, num_workers=2, rank=1, num_devices=2, device_index=1, device_port=2)
    found = rendezvous_of_store("dist_device_sync", job)
    assert found is not None
    assert (found.rank, found.size, found.port, found.name) == (3, 4, 1, "worker 1, device 1")


@pytest.mark.parametrize("name", ["local", "device", "nccl", "nccl_allreduce"])
def test_devices_of_one_worker_meet_at_their_own_port(name: str) -> None:
    found = rendezvous_of_store(name, DEVICES)
    assert found == rendezvous_of_devices("dist_async", DEVICES)
    assert found is not None
    assert (found.rank, found.size, found.address, found.listen_fd) == (1, 2, "127.0.0.1:2", 8)
    assert found.name == "worker 4, device 1"


def test_under_torchrun_devices_meet_at_its_store() -> None:
    job = Job(scheduler_host="head", scheduler_port=1, num_devices=2, device_index=0, rank=0, rendezvous_hosted=True)
    found = rendezvous_of_store("nccl", job)
    assert found is not None
    assert (found.rank, found.address, found.is_host) == (0, "head:1", False)


@pytest.mark.parametrize("name", ["local", "nccl", "dist_sync", "dist_device_sync"])
def test_a_single_process_needs_no_rendezvous(name: str) -> None:
    assert rendezvous_of_store(name, Job(scheduler_port=1)) is None


def test_every_round_at_an_address_has_its_own_prefix() -> None:
    rounds = Rounds()
    workers, devices = rendezvous_of_store("dist_sync", WORKERS), rendezvous_of_store("nccl", DEVICES)
    assert workers is not None
    assert devices is not None
    assert [rounds.next_prefix(one) for one in (workers, devices, workers)] == [
        "rendezvous 1",
        "rendezvous 1",
        "rendezvous 2",
    ]
