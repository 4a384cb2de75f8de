"""The Trainer against plain PyTorch: one worker bit for bit, several workers within a tolerance; and the schemes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from plain_loops import (
    STEPS,
    STORES,
    Loop,
    MakeOptimizer,
    Net,
    State,
    assert_close,
    assert_same_bits,
    batches,
    differs,
    joined,
    on_one_worker,
    parts_of,
    seeded,
    snapshot,
    two_groups,
)
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, StepLR

import echelon
import tolerances
from echelon.kvstore import KVStore
from echelon.launch.threads.in_process import run
from echelon.transport.in_process import InProcessTransport
from echelon.transport.shared_memory import SharedMemoryTransport
from echelon.transport.sockets import TcpTransport

pytestmark = pytest.mark.numeric

PIXELS = 64  # of an image of `batches`
TRANSPORTS = [InProcessTransport, SharedMemoryTransport, TcpTransport]


def of(kind: type[Optimizer], **settings: Any) -> MakeOptimizer:
    return lambda model: kind(model.parameters(), **settings)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": of(SGD, lr=0.1),
    "sgd-momentum": of(SGD, lr=0.1, momentum=0.9),
    "sgd-nesterov": of(SGD, lr=0.1, momentum=0.9, nesterov=True),
    "sgd-dampening": of(SGD, lr=0.1, momentum=0.9, dampening=0.3),
    "sgd-decay": of(SGD, lr=0.1, momentum=0.5, weight_decay=0.01),
    "sgd-maximize": of(SGD, lr=0.01, momentum=0.9, weight_decay=0.01, maximize=True),
    "sgd-fused": of(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, fused=True),
    "adam": of(Adam, lr=0.01),
    "adam-decay": of(Adam, lr=0.01, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-6),
    "adam-decoupled": of(Adam, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "adam-amsgrad": of(Adam, lr=0.01, amsgrad=True),
    "adam-fused": of(Adam, lr=0.01, weight_decay=0.1, fused=True),
    "adam-amsgrad-fused": of(Adam, lr=0.01, amsgrad=True, maximize=True, fused=True),
    "adamw": of(AdamW, lr=0.01, weight_decay=0.1),
    "adamw-amsgrad": of(AdamW, lr=0.01, amsgrad=True, maximize=True),
    "adamw-fused": of(AdamW, lr=0.01, fused=True),
    "rmsprop": of(RMSprop, lr=0.01),
    "rmsprop-all": of(RMSprop, lr=0.001, alpha=0.9, centered=True, momentum=0.5, weight_decay=0.01),
    "rmsprop-centered": of(RMSprop, lr=0.001, centered=True, maximize=True),
    "adagrad": of(Adagrad, lr=0.05),
    "adagrad-all": of(Adagrad, lr=0.05, lr_decay=0.01, weight_decay=0.01, initial_accumulator_value=0.3),
    "adagrad-fused": of(Adagrad, lr=0.05, initial_accumulator_value=0.3, fused=True),
}


# --- one worker gives plain PyTorch's weights, bit for bit


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_one_worker_is_plain_pytorch(optimizer: MakeOptimizer) -> None:
    loop = Loop(seeded(Net), optimizer)
    data = batches(STEPS)
    expected = loop.plain(data)
    assert differs(expected, snapshot(loop.model))
    for store in STORES:
        assert_same_bits(on_one_worker(lambda kv: loop.worker(kv, data), store), expected)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("optimizer", ["sgd-decay", "adam-fused"])
def test_one_worker_is_plain_pytorch_over(transport: Any, optimizer: str) -> None:
    loop = Loop(seeded(Net), OPTIMIZERS[optimizer])
    data = batches(STEPS)
    for servers in (1, 3):
        found = on_one_worker(lambda kv: loop.worker(kv, data), "dist_sync", transport=transport(), num_servers=servers)
        assert_same_bits(found, loop.plain(data))


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: StepLR(optimizer, 2, gamma=0.1),
        lambda optimizer: CosineAnnealingLR(optimizer, STEPS, eta_min=0.001),
        lambda optimizer: LambdaLR(optimizer, lambda step: 1.0 / (1 + step)),
    ],
    ids=["step", "cosine", "lambda"],
)
@pytest.mark.parametrize("optimizer", [OPTIMIZERS["sgd-momentum"], OPTIMIZERS["adamw"], two_groups])
def test_servers_follow_the_learning_rate_schedule(optimizer: MakeOptimizer, schedule: Any) -> None:
    loop = Loop(seeded(Net), optimizer, schedule)
    data = batches(STEPS)
    expected = loop.plain(data)
    assert differs(expected, Loop(loop.model, optimizer).plain(data)), "the schedule has no effect"
    for store in ("local", "dist_sync", "dist_async"):
        assert_same_bits(on_one_worker(lambda kv: loop.worker(kv, data), store), expected)


@pytest.mark.parametrize("fused", [False, True])
def test_groups_of_parameters_keep_their_settings(fused: bool) -> None:
    def groups(model: nn.Module) -> Optimizer:
        children = list(model.children())
        settings: list[dict[str, Any]] = [
            {"params": list(children[1].parameters()), "lr": 0.003, "weight_decay": 0.3},
            {"params": [*children[0].parameters(), *children[2].parameters()], "betas": (0.5, 0.6)},
        ]
        return AdamW(settings, lr=0.01, fused=fused)

    data = batches(STEPS)
    for make in (groups, two_groups):
        loop = Loop(seeded(Net), make)
        for store in STORES:
            found = on_one_worker(partial(loop.worker, data=data), store)
            assert_same_bits(found, loop.plain(data))


# --- several workers


def weighted(sizes: list[int], optimizer: MakeOptimizer, dtype: torch.dtype) -> tuple[list[State], State]:
    """Return the weights of workers with batches of these sizes, and of one process with the joined batches."""
    loop = Loop(seeded(Net).to(dtype), optimizer)
    parts = parts_of(sizes, dtype=dtype)
    found = run(lambda kv: loop.worker(kv, parts[kv.rank]), "dist_sync", num_workers=len(sizes))
    return found, loop.plain(joined(parts))


@pytest.mark.parametrize("optimizer", ["sgd-momentum", "sgd-decay", "adamw", "rmsprop-all", "adagrad"])
@pytest.mark.parametrize("sizes", [[4, 4], [6, 2, 5]], ids=["equal batches", "unequal batches"])
def test_bsp_is_one_process_on_the_joined_batch(sizes: list[int], optimizer: str) -> None:
    """Gradients are weighted by their samples, so the sums differ only in their order.

    An adaptive optimizer magnifies the difference where a gradient is near zero, as it does in plain PyTorch.
    """
    for dtype in (torch.float64, torch.float32):
        tolerance = tolerances.reordering(dtype, sum(sizes) * PIXELS, STEPS, magnification=100)
        found, expected = weighted(sizes, OPTIMIZERS[optimizer], dtype)
        for state in found:
            assert_same_bits(state, found[0])
            assert_close(state, expected, tolerance)


def trained(store: str, workers: int = 3, transport: Any = InProcessTransport, **options: Any) -> list[State]:
    """Return the weights of workers that each have their own data."""
    loop = Loop(seeded(Net), OPTIMIZERS["sgd-decay"])
    data = parts_of(range(3, 3 + workers))
    return run(lambda kv: loop.worker(kv, data[kv.rank]), store, num_workers=workers, transport=transport(), **options)


def test_bsp_is_reproducible_and_all_workers_end_with_the_same_weights() -> None:
    """Sums are in rank order, whatever arrives first, over any transport and with any number of servers."""
    first = trained("dist_sync")
    for state in first:
        assert_same_bits(state, first[0])
    for transport in TRANSPORTS:
        for servers in (1, 2, 3):
            for state in trained("dist_sync", transport=transport, num_servers=servers):
                assert_same_bits(state, first[0])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_gsp_of_one_group_is_bsp(transport: Any) -> None:
    expected = trained("dist_sync")
    for state in trained("dist_gsync", groups=[[0, 1, 2]], transport=transport):
        assert_same_bits(state, expected[0])


@pytest.mark.parametrize(
    ("store", "options"),
    [
        ("dist_async", {}),
        ("dist_ssync", {"staleness": 0}),
        ("dist_ssync", {"staleness": 2}),
        ("dist_async", {"lr_scale": "mxnet"}),
        ("dist_ssync", {"staleness": 2, "lr_scale": "mxnet"}),
        ("dist_gsync", {"groups": [[0, 2], [1, 3]]}),
    ],
)
def test_schemes_that_wait_less_apply_every_step(store: str, options: dict[str, Any]) -> None:
    """The order of steps varies, but with SGD and a constant gradient the sum of all steps does not.

    A sample moves the weights by the same amount as in lock-step, where the sum is STEPS; MXNet's scale moves them by
    that amount for every worker.
    """

    def program(kv: KVStore) -> float:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        trainer = echelon.Trainer(model, SGD(model.parameters(), lr=1.0), kv)
        for _ in range(STEPS):
            model(torch.full((2, 1), -1.0)).mean().backward()
            trainer.step(2)
        trainer.sync()
        kv.barrier()
        out = torch.empty(1, 1)
        kv.pull("weight", out)
        kv.barrier()
        trainer.close()
        return float(out)

    found = run(program, store, num_workers=4, **options)
    assert len(set(found)) == 1
    if store == "dist_gsync":  # 2 groups; a step counts 1/gamma, with gamma between 1 and 1 + the other group's steps
        assert 2 <= found[0] <= 2 * STEPS
    else:
        assert found[0] == STEPS * (4 if options.get("lr_scale") == "mxnet" else 1)


def test_workers_start_with_the_weights_of_rank_0() -> None:
    models = [seeded(Net, seed=rank) for rank in range(2)]
    first = snapshot(models[0])

    def program(kv: KVStore) -> State:
        model = models[kv.rank]
        with echelon.Trainer(model, SGD(model.parameters(), lr=0.1), kv):
            kv.barrier()
            return snapshot(model)

    for state in run(program, "dist_sync", num_workers=2):
        assert_same_bits(state, first)
