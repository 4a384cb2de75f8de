"""Whatever server is killed, and whenever: the weights of dist_sync are those of an undisturbed run, bit for bit."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulated_servers import World
from torch import Tensor

from echelon.cluster.messages import Configure, Offer, encode

STEPS = 4


@cache
def undisturbed(num_servers: int, num_workers: int) -> dict[int, list[Tensor]]:
    world = World(num_servers, num_workers, STEPS, replicas=False)
    world.set_up()
    while choices := world.choices():
        world.do(choices[0])
    assert world.is_done
    return world.final_weights()


def same(one: dict[int, list[Tensor]], other: dict[int, list[Tensor]]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(a, b) for n in one for a, b in zip(one[n], other[n], strict=True))


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False), st.integers(2, 3), st.integers(0, 120), st.integers(0, 2))
def test_a_killed_server_loses_nothing(random: object, num_servers: int, when: int, which: int) -> None:
    world = World(num_servers, 2, STEPS, replicas=True)
    world.set_up()
    happened = 0
    while choices := world.choices():
        if happened == when:
            world.kill(which % num_servers)
            choices = world.choices()
        happened += 1
        world.do(random.choice(choices))  # type: ignore[attr-defined]
    assert world.is_done
    assert same(world.final_weights(), undisturbed(num_servers, 2))


@pytest.mark.parametrize("num_servers", [2, 3])
def test_backups_change_nothing(num_servers: int) -> None:
    world = World(num_servers, 2, STEPS, replicas=True)
    world.set_up()
    while choices := world.choices():
        world.do(choices[-1])
    assert world.is_done
    assert same(world.final_weights(), undisturbed(num_servers, 2))


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False), st.integers(0, 60), st.integers(0, 60), st.integers(0, 1), st.integers(0, 1))
def test_a_server_that_was_started_again_takes_over(random: object, first: int, gap: int, one: int, other: int) -> None:
    """Kill a server, start it again, wait until it has everything, and kill either one: nothing is lost."""
    world = World(2, 2, STEPS, replicas=True)
    world.set_up()
    happened, killed_at = 0, None
    while choices := world.choices():
        if happened == first:
            world.kill(one)
        elif happened == first + gap + 1:
            world.restart(one)
        elif killed_at is None and happened > first + gap + 1 and all(stored.in_sync for stored in world.slices):
            world.kill(other)
            killed_at = happened
        happened += 1
        world.do(random.choice(world.choices() or choices))  # type: ignore[attr-defined]
    assert world.is_done
    assert same(world.final_weights(), undisturbed(2, 2))


def test_a_promoted_slice_knows_who_has_closed_the_store_while_its_primary_was_silent() -> None:
    """The scheduler tells all servers; the primary of slice 0 is stopped, and forwards nothing any more."""
    world = World(2, 2, STEPS, replicas=True)
    world.set_up()
    backup = world.servers[1]
    backup.slices.close(1, 0)
    world.kill(0)
    del world.views["worker-1"]  # it has closed its connections
    while choices := [choice for choice in world.choices() if choice[0] != "step"]:
        world.do(choices[0])
    world.workers[0].step()
    world.run_to_rest()
    assert not world.workers[0].is_waiting


@pytest.mark.parametrize("followed", [0, 1, 2], ids=["neither", "gone", "both"])
def test_a_promoted_slice_does_not_take_a_worker_for_its_predecessor(followed: int) -> None:
    """Worker 1 is started again. Slice 0's primary has followed none, one or both of these views when it dies."""
    world = World(2, 2, STEPS, replicas=True)
    world.set_up()
    for worker in world.workers:
        worker.step()
    world.run_to_rest()
    world.workers[1].step()
    world.run_to_rest()  # its push waits for worker 0
    world.replace_worker(1)
    for _ in range(followed):
        world.deliver_view("server-0")
        world.run_to_rest()
    world.kill(0)
    while choices := [choice for choice in world.choices() if choice[0] != "step"]:
        world.do(choices[0])
    for _ in range(2):  # the first round has a push of the old process; none waits for the new one before it joins
        world.workers[0].step()
        world.run_to_rest()
        assert not world.workers[0].is_waiting
    world.servers[1].slices.send_due(0.0)
    left = {(report.slice, report.worker) for report in world.settled}
    assert left == {(0, 1), (1, 1)}, "the scheduler is told which steps of the old process were applied"
    shards = [hosted.shards[0] for hosted in world.servers[1].slices.hosted.values()]
    assert [shard.workers for shard in shards] == [{0: "", 1: "again"}] * 2
    assert [shard.attached() for shard in shards] == [[], []]


def test_a_server_that_is_rebuilt_does_not_wait_for_a_worker_that_has_closed_the_store() -> None:
    world = World(1, 2, STEPS, replicas=False)
    world.set_up()
    world.restart_empty(0)
    server, worker = world.servers[0], world.workers[0]
    (hosted,) = server.slices.primaries
    configure = Configure(worker.next_id(), 0, "dist_sync", None, None, "share")
    offer = Offer(worker.next_id(), [], [], None, [], [])
    for message in (configure, offer):
        server.reception.receive(worker.name(0).encode(), [memoryview(encode(message))])
    assert hosted.recoveries[0].missing == [1]
    server.slices.close(1, 0)
    assert not hosted.recoveries
    assert list(hosted.shards[0].workers) == [0]
