"""Clipping by the global norm with lost, repeated and late messages: each round is applied once, with its norm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from faulty import LOSE, LOSE_ANSWER, REPEAT, REPEAT_ANSWER, REPEAT_LATE, FaultyTransport, MessageFault
from torch import Tensor, nn

from echelon.kvstore import KVStore
from echelon.kvstore.servers.store import ServerStore
from echelon.launch import in_process
from echelon.transport.in_process import InProcessTransport
from tolerances import reordering

CLOCKS, MAX_NORM = 5, 1.0
SHAPES = {"narrow": (3, 5), "wide": (70, 1000)}  # wide: a part of it on every server
ACTIONS = (LOSE, LOSE_ANSWER, REPEAT, REPEAT_ANSWER, REPEAT_LATE)
KINDS = ("Push", "MeasureNorm", "ApplyScaled")


def gradients(rank: int, clock: int) -> list[Tensor]:
    """Return the gradients of a worker; their norm is above MAX_NORM in some rounds only."""
    draw = torch.Generator().manual_seed(10 * clock + rank)
    return [torch.randn(shape, generator=draw) * (0.001 if clock % 2 else 1.0) for shape in SHAPES.values()]


def program(kv: KVStore) -> tuple[list[float], list[Tensor]]:
    """Return the norm of every round and the weights at the end."""
    assert isinstance(kv, ServerStore)
    names = list(SHAPES)
    weights = [torch.zeros(shape) for shape in SHAPES.values()]
    kv.init(names, weights)
    kv.set_optimizer("sgd", lr=1.0)
    norms = []
    for clock in range(CLOCKS):
        tickets = []
        for name, gradient in zip(names, gradients(kv.rank, clock), strict=True):
            kv.views(name)[1].copy_(gradient)
            tickets += kv.push_bucket(kv.slots([name]), float(1 + kv.rank), [], gated=True)
        norms.append(kv.clip(kv.slots(names), MAX_NORM))
        kv.wait(tickets)
    kv.pull(names, weights)
    return norms, weights


def reference(workers: Sequence[int]) -> tuple[list[float], list[Tensor]]:
    """Return the same for one process that clips the mean, weighted by samples."""
    weights = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES.values()]
    optimizer = torch.optim.SGD(weights, lr=1.0)
    norms = []
    samples = [1.0 + worker for worker in workers]
    for clock in range(CLOCKS):
        pushed = [gradients(worker, clock) for worker in workers]
        for number, weight in enumerate(weights):
            weight.grad = torch.zeros_like(weight)
            for one, share in zip(pushed, samples, strict=True):
                weight.grad += one[number] * (share / sum(samples))
        norms.append(float(nn.utils.clip_grad_norm_(weights, MAX_NORM)))
        optimizer.step()
    return norms, [weight.detach() for weight in weights]


def check(results: Sequence[tuple[list[float], list[Tensor]]], groups: Sequence[Sequence[int]]) -> None:
    """Compare every worker's norms with those of its group, and the weights where the group is alone."""
    size = sum(weight.numel() for weight in results[0][1])
    for group in groups:
        norms, weights = reference(group)
        rtol = reordering(torch.float32, size, CLOCKS)
        for worker in group:
            assert results[worker][0] == results[group[0]][0], "the same number for all workers of a group"
            assert results[worker][0] == pytest.approx(norms, rel=rtol)
            if len(groups) == 1:
                torch.testing.assert_close(results[worker][1], weights, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("framed", [pytest.param(False, id="shared"), pytest.param(True, id="framed")])
@pytest.mark.parametrize("num_servers", [1, 2, 3])
def test_three_workers_clip_the_mean(num_servers: int, framed: bool) -> None:
    transport = FaultyTransport(InProcessTransport(), [], framed=framed)
    results = in_process.run(program, "dist_sync", num_workers=3, num_servers=num_servers, transport=transport)
    check(results, [[0, 1, 2]])


def test_each_group_clips_its_own_mean() -> None:
    results = in_process.run(program, "dist_gsync", num_workers=3, num_servers=2, groups=[[0, 2], [1]])
    check(results, [[0, 2], [1]])


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("num_servers", [1, 2])
def test_lost_and_repeated_messages_change_nothing(
    num_servers: int, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echelon.kvstore.servers.client.ASK_AFTER_S", 0.05)
    kinds = KINDS if num_servers > 1 else KINDS[:2]  # one server needs no exchange
    faults = [MessageFault(rank, kind, action, 1 + 2 * rank) for rank in (0, 1) for kind in kinds]
    faults += [MessageFault(1, "Push", action, 0)]  # before the keys of a push are a lane
    transport = FaultyTransport(InProcessTransport(), faults)
    results = in_process.run(program, "dist_sync", num_workers=2, num_servers=num_servers, transport=transport)
    assert Counter(transport.fired) == Counter(faults)
    check(results, [[0, 1]])
