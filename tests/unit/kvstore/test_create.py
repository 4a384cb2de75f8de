"""Making a store: names, dials and jobs that cannot be, said before anybody waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from echelon.environment import Job
from echelon.errors import UsageError
from echelon.kvstore import NAMES, KVStore, create
from echelon.launch.in_process import run
from echelon.schemes import STORES

ONE_WORKER = [kind.name for kind in STORES.values() if not kind.spans_workers]
ALL_WORKERS = [kind.name for kind in STORES.values() if kind.spans_workers and kind.collective]
WITH_SERVERS = [kind.name for kind in STORES.values() if not kind.collective]
LONELY = Job()
DISTRIBUTED = Job(scheduler_port=1, num_servers=1)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("dist_synk", "dist_sync"), ("dist-async", "dist_async"), ("dist_gsynch", "dist_gsync"), ("locla", "local")],
)
def test_an_unknown_store_gets_the_nearest_name(name: str, meant: str) -> None:
    with pytest.raises(UsageError) as caught:
        create(name, job=LONELY)
    assert f"unknown store {name!r}; did you mean {meant!r}? Choose one of " in str(caught.value)
    assert all(store in str(caught.value) for store in NAMES)


def test_an_unknown_store_unlike_any_gets_the_list() -> None:
    with pytest.raises(UsageError) as caught:
        create("zzz", job=LONELY)
    assert str(caught.value) == f"unknown store 'zzz'; choose one of {', '.join(NAMES)}"


@pytest.mark.parametrize("name", [None, 3, ["local"]])
def test_a_name_is_a_string(name: Any) -> None:
    with pytest.raises(UsageError, match="the name of a store must be a string"):
        create(name, job=LONELY)


@pytest.mark.parametrize("name", WITH_SERVERS)
def test_a_dist_store_needs_a_job(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} needs a scheduler and servers.*echelon launch"):
        create(name, job=LONELY)


@pytest.mark.parametrize("name", ALL_WORKERS)
def test_collectives_between_workers_need_a_job(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} needs a job: .*echelon launch -n WORKERS -s 0.*torchrun"):
        create(name, job=LONELY)


@pytest.mark.parametrize("name", [*ALL_WORKERS, "dist_sync"])
def test_a_worker_must_know_its_rank(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}: this worker has no rank; set ECHELON_RANK, 0 to 2"):
        create(name, job=Job(scheduler_port=1, num_workers=3))


@pytest.mark.parametrize("name", [*ALL_WORKERS, *ONE_WORKER, "dist_sync"])
def test_alone_every_collective_is_a_store_of_one(name: str) -> None:
    """Without torch.distributed: nobody listens at port 1."""
    with create(name, job=Job(scheduler_port=1, num_servers=0)) as kv:
        assert (kv.type, kv.rank, kv.num_workers, kv.workers) == (name, 0, 1, [0])


@pytest.mark.parametrize("name", ["nccl", "dist_device_sync"])
def test_lock_step_has_no_dials(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} has no staleness: its workers run in lock-step"):
        create(name, staleness=3, job=DISTRIBUTED)
    with pytest.raises(UsageError, match=f"{name} has no groups"):
        create(name, groups=[[0]], job=DISTRIBUTED)


def test_devices_need_somewhere_to_meet() -> None:
    with pytest.raises(UsageError, match=r"nccl: the 2 devices need a port .*; set ECHELON_DEVICE_PORT"):
        create("nccl", job=Job(num_devices=2))


def test_a_workers_own_collectives_do_not_reach_others() -> None:
    """As torchrun on several nodes would have it."""
    with pytest.raises(
        UsageError, match="nccl is for the devices of one worker, and this job has 2 workers: use dist_"
    ):
        create("nccl", job=Job(scheduler_port=1, num_workers=2, rank=0, num_devices=2))


def test_devices_of_a_worker_with_servers_need_somewhere_to_meet() -> None:
    """Not at the scheduler's port, which is another's."""
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
def test_dials_that_do_not_fit_are_refused_before_joining(
    name: str, dials: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Port 1 has no scheduler: an attempt to join would wait for the job's deadline and be another error."""
    monkeypatch.chdir(tmp_path)  # no groups file here
    with pytest.raises(UsageError, match=words):
        create(name, job=DISTRIBUTED, **dials)


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([[0], [0, 1]], "worker 0 is already in line 1"),
        ([[0]], "is in no group; every worker must be in one"),
        ([[0], [1, 2]], "worker 2 does not exist"),
    ],
)
def test_groups_that_do_not_fit_the_workers(groups: list[list[int]], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        run(lambda kv: None, "dist_gsync", num_workers=2, groups=groups)


def test_a_missing_groups_file_is_named(tmp_path: Path) -> None:
    missing: Any = tmp_path / "nowhere"
    with pytest.raises(UsageError, match=f"no groups file {missing}"):
        run(lambda kv: None, "dist_gsync", num_workers=1, groups=missing)


def test_groups_come_from_a_file(tmp_path: Path) -> None:
    file: Any = tmp_path / "groups"
    file.write_text("1\n0 2\n")

    def program(kv: KVStore) -> int:
        kv.barrier()
        return kv.rank

    assert run(program, "dist_gsync", num_workers=3, groups=file) == [0, 1, 2]


def test_groups_may_be_written_with_commas() -> None:
    commas: Any = "0,2/1"
    assert run(lambda kv: kv.rank, "dist_gsync", num_workers=3, groups=commas) == [0, 1, 2]


def test_closing_twice_is_harmless() -> None:
    def program(kv: KVStore) -> None:
        kv.close()
        kv.close()

    run(program, "dist_sync", num_workers=2)
