"""What the Ray launcher asks Ray for, without Ray."""

from __future__ import annotations

from typing import Any

import pytest

from echelon.environment import Job
from echelon.errors import UsageError
from echelon.launch.hosts import Host
from echelon.launch.interface import Output
from echelon.launch.plan import Plan, Request
from echelon.launch.ray import launcher as module
from echelon.launch.ray.launcher import RayLauncher, make_placement
from echelon.launch.ray.placement import ActorPlace, Lost, Placed, decode_event, decode_placement, encode


def plan(num_workers: int, num_servers: int, **options: Any) -> Plan:
    request = Request(Job(num_workers=num_workers, num_servers=num_servers), ["python", "train.py"], options=options)
    return RayLauncher().plan(request)


def test_a_bundle_has_at_most_one_worker_and_one_server_and_what_they_need() -> None:
    placement = make_placement(plan(3, 2, ray_worker_cpus=4.0, ray_worker_gpus=1.0, ray_server_cpus=2.0))
    assert placement.bundles == [{"CPU": 6.0, "GPU": 1.0}, {"CPU": 6.0, "GPU": 1.0}, {"CPU": 4.0, "GPU": 1.0}]
    assert placement.actors == [
        ActorPlace("scheduler 0", 0, 0.0, 0.0),
        ActorPlace("server 0", 0, 2.0, 0.0),
        ActorPlace("server 1", 1, 2.0, 0.0),
        ActorPlace("worker 0", 2, 4.0, 1.0),
        ActorPlace("worker 1", 0, 4.0, 1.0),
        ActorPlace("worker 2", 1, 4.0, 1.0),
    ]


@pytest.mark.parametrize(("num_workers", "num_servers"), [(1, 0), (4, 0), (1, 3), (3, 1)])
def test_every_bundle_asks_for_something(num_workers: int, num_servers: int) -> None:
    placement = make_placement(plan(num_workers, num_servers))
    assert len(placement.bundles) == max(num_workers, num_servers)
    assert all(placement.bundles)
    assert sum(bundle["CPU"] for bundle in placement.bundles) == num_workers + num_servers


def test_the_dry_run_shows_the_bundles_and_who_is_in_which() -> None:
    text = RayLauncher().describe(plan(2, 1, ray_strategy="STRICT_SPREAD", ray_address="head:6379"))
    lines = [line for line in text.splitlines() if "DMLC_" not in line]
    assert lines[:4] == [
        "Ray cluster: head:6379",
        "placement group, strategy STRICT_SPREAD:",
        "    bundle-0: 2 CPU",
        "    bundle-1: 1 CPU",
    ]
    assert [line.partition(":")[0] for line in lines[4:]] == [
        "scheduler 0 on bundle-0",
        "server 0 on bundle-0",
        "worker 0 on bundle-1",
        "worker 1 on bundle-0",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ray_worker_cpus": 0.0}, "--ray-worker-cpus must be above 0, not 0"),
        ({"ray_server_cpus": -1.0}, "--ray-server-cpus must be above 0, not -1"),
        ({"ray_worker_gpus": float("nan")}, "--ray-worker-gpus must be 0 or more, not nan"),
        ({"ray_max_restarts": -1}, "--ray-max-restarts must be 0 or more, not -1"),
    ],
)
def test_flags_that_cannot_work_are_rejected_before_anything_starts(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan(2, 1, **options)


def test_hosts_and_folders_are_rays_to_choose() -> None:
    with pytest.raises(UsageError, match="omit -H, and name the cluster with --ray-address"):
        RayLauncher().plan(Request(Job(), ["python"], hosts=(Host("a"),)))
    with pytest.raises(UsageError, match="use --ray-upload"):
        RayLauncher().plan(Request(Job(), ["python"], sync_dst_dir="/tmp/there"))


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'echelon\[ray\]'"):
        RayLauncher().run(plan(1, 0), Output())


def test_messages_are_lines() -> None:
    placement = make_placement(plan(2, 1))
    assert decode_placement(encode(placement)) == placement
    for event in (Placed("worker 0", "10.0.0.1"), Lost("worker 1", "its node\nhas died")):
        assert encode(event).count(b"\n") == 1
        assert decode_event(encode(event)) == event
