"""Creating a store: invalid names, settings and jobs are rejected before any other process waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from echelon.environment import Job
from echelon.errors import UsageError
from echelon.kvstore import create
from echelon.schemes import STORES

ONE_WORKER = [kind.name for kind in STORES.values() if not kind.spans_workers]
ALL_WORKERS = [kind.name for kind in STORES.values() if kind.spans_workers and kind.collective]
WITH_SERVERS = [kind.name for kind in STORES.values() if not kind.collective]
NO_JOB = Job()
DISTRIBUTED = Job(scheduler_port=1, num_servers=1)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("dist_synk", "dist_sync"), ("dist-async", "dist_async"), ("dist_gsynch", "dist_gsync"), ("locla", "local")],
)
def test_an_unknown_store_suggests_the_nearest_name(name: str, meant: str) -> None:
    with pytest.raises(UsageError) as caught:
        create(name, job=NO_JOB)
    assert f"unknown store {name!r}; did you mean {meant!r}? Choose one of " in str(caught.value)
    assert all(store in str(caught.value) for store in STORES)


def test_an_unknown_store_without_a_near_name_lists_all_names() -> None:
    with pytest.raises(UsageError) as caught:
        create("zzz", job=NO_JOB)
    assert str(caught.value) == f"unknown store 'zzz'; choose one of {', '.join(STORES)}"


@pytest.mark.parametrize("name", [None, 3, ["local"]])
def test_a_name_is_a_string(name: Any) -> None:
    with pytest.raises(UsageError, match="the name of a store must be a string"):
        create(name, job=NO_JOB)


@pytest.mark.parametrize("name", WITH_SERVERS)
def test_a_dist_store_needs_a_job(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} needs a scheduler and servers.*echelon launch"):
        create(name, job=NO_JOB)


@pytest.mark.parametrize("name", ALL_WORKERS)
def test_collectives_between_workers_need_a_job(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} needs a job: .*echelon launch -n WORKERS -s 0.*torchrun"):
        create(name, job=NO_JOB)


@pytest.mark.parametrize("name", [*ALL_WORKERS, "dist_sync"])
def test_a_worker_needs_a_rank(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}: this worker has no rank; set ECHELON_RANK, 0 to 2"):
        create(name, job=Job(scheduler_port=1, num_workers=3))


@pytest.mark.parametrize("name", [*ALL_WORKERS, *ONE_WORKER, "dist_sync"])
def test_a_collective_store_of_one_process_needs_no_rendezvous(name: str) -> None:
    """It does not use torch.distributed: nobody listens at port 1."""
    with create(name, job=Job(scheduler_port=1, num_servers=0)) as kv:
        assert (kv.type, kv.rank, kv.num_workers, kv.workers) == (name, 0, 1, [0])


@pytest.mark.parametrize("name", ["nccl", "dist_device_sync"])
def test_lock_step_stores_have_neither_staleness_nor_groups(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} has no staleness: its workers run in lock-step"):
        create(name, staleness=3, job=DISTRIBUTED)
    with pytest.raises(UsageError, match=f"{name} has no groups"):
        create(name, groups=[[0]], job=DISTRIBUTED)


def test_devices_need_a_port_for_their_rendezvous() -> None:
    with pytest.raises(UsageError, match=r"nccl: the 2 devices need a port .*; set ECHELON_DEVICE_PORT"):
        create("nccl", job=Job(num_devices=2))


def test_a_store_of_one_worker_is_rejected_in_a_job_of_two() -> None:
    """torchrun on several nodes gives such a job."""
    with pytest.raises(
        UsageError, match="nccl is for the devices of one worker, and this job has 2 workers: use dist_"
    ):
        create("nccl", job=Job(scheduler_port=1, num_workers=2, rank=0, num_devices=2))


def test_devices_of_a_worker_with_servers_need_a_port_of_their_own() -> None:
    """They cannot use the scheduler's port."""
    with pytest.raises(UsageError, match=r"dist_async: the 4 devices of a worker need a port .* ECHELON_DEVICE_PORT"):
        create("dist_async", job=Job(scheduler_port=1, num_workers=2, num_servers=1, num_devices=4))


@pytest.mark.parametrize("name", ["dist_async", "dist_gsync"])
def test_a_relaxed_store_needs_a_server(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} needs at least one server; the job has 0"):
        create(name, job=Job(scheduler_port=1, num_servers=0))


@pytest.mark.parametrize(
    ("name", "dials", "words"),
    [
        ("dist_ssync", {}, "dist_ssync needs a bound: give staleness"),
        ("dist_gsync", {}, "dist_gsync needs groups"),
        ("dist_sync", {"staleness": 3}, "dist_sync has no staleness, but staleness=3 was given"),
        ("dist_async", {"staleness": 0}, "dist_async has no staleness, but staleness=0 was given"),
        ("dist_sync", {"groups": [[0]]}, "dist_sync has no groups"),
        ("dist_ssync", {"staleness": 1, "groups": [[0]]}, "dist_ssync has no groups"),
        ("dist_ssync", {"staleness": -1}, "staleness must be 0 or more, not -1"),
        ("dist_sync", {"transport": "pigeon"}, "unknown transport 'pigeon'; choose one of auto, shm, tcp"),
    ],
)
def test_invalid_settings_are_rejected_before_joining(
    name: str, dials: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody listens at port 1: an attempt to join would wait for the timeout and raise another error."""
    monkeypatch.chdir(tmp_path)  # no groups file here
    with pytest.raises(UsageError, match=words):
        create(name, job=DISTRIBUTED, **dials)
