"""The optimizers of echelon.optim: equal to a plain loop under every store, portable states, and rejected uses."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from collective_loops import largest_difference
from plain_loops import (
    STEPS,
    STORES,
    Batch,
    Loop,
    MakeOptimizer,
    Net,
    State,
    assert_same_bits,
    batches,
    differs,
    joined,
    on_one_worker,
    parts_of,
    seeded,
    snapshot,
    take_steps,
)
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import echelon
import tolerances
from echelon.errors import UsageError
from echelon.kvstore import KVStore
from echelon.launch.threads.in_process import run as run_with_servers
from echelon.optim import (
    DCASGD,
    FTML,
    LAMB,
    LARS,
    LBSGD,
    NAG,
    SGD,
    SGLD,
    Accumulate,
    AdaDelta,
    AdaGrad,
    Adam,
    Adamax,
    Ftrl,
    GroupAdaGrad,
    LBSGDByNorm,
    Nadam,
    RMSProp,
    Signum,
    create,
)
from echelon.transport.sockets import TcpTransport
from forked import run

pytestmark = pytest.mark.numeric

PARTS = (4, 3)  # batches of two workers


def of(kind: Any, **settings: Any) -> MakeOptimizer:
    """Return a factory of an optimizer with biases in a group of their own, without decay."""

    def make(model: nn.Module) -> Any:
        named = list(model.named_parameters())
        groups = [
            {"params": [p for name, p in named if "bias" not in name]},
            {"params": [p for name, p in named if "bias" in name], "weight_decay": 0.0},
        ]
        return kind(groups, **settings)

    return make


LIMITED: dict[str, Any] = {"rescale_grad": 2.0, "clip_gradient": 1e-3}
ELEMENTWISE: dict[str, MakeOptimizer] = {
    "sgd": of(SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "sgd-clipped": of(SGD, lr=0.1, momentum=0.9, **LIMITED),
    "nag": of(NAG, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adam": of(Adam, lr=0.01, weight_decay=0.1, **LIMITED),
    "adagrad": of(AdaGrad, lr=0.01, weight_decay=0.1),
    "rmsprop": of(RMSProp, lr=0.01, weight_decay=0.1, **LIMITED),
    "rmsprop-centered": of(RMSProp, lr=0.001, centered=True, clip_weights=0.2),
    "adadelta": of(AdaDelta, weight_decay=0.1),
    "adamax": of(Adamax, lr=0.01, weight_decay=0.1),
    "nadam": of(Nadam, lr=0.01, weight_decay=0.1),
    "lbsgd": of(LBSGD, lr=0.1, momentum=0.9, weight_decay=0.01, batch_scale=3, warmup_updates=4),
    "signum": of(Signum, lr=0.01, weight_decay=0.1, wd_lh=0.3),
    "signsgd": of(Signum, lr=0.01, momentum=0, weight_decay=0.1),
    "ftml": of(FTML, lr=0.01, weight_decay=0.1),
    "ftrl": of(Ftrl, lr=0.1, weight_decay=0.1, lamda1=1e-4),
    "dcasgd": of(DCASGD, lr=0.1, weight_decay=0.1),
    "dcasgd-momentum": of(DCASGD, lr=0.1, momentum=0.9, lamda=2.0),
    "test": of(Accumulate),
}
BY_NORM: dict[str, MakeOptimizer] = {
    "lars": of(LARS, lr=0.1, weight_decay=0.01, eta=0.1),
    "lars-momentum": of(LARS, lr=0.1, momentum=0.9, eta=0.1, eps=0.1),
    "lbsgd-lars": of(LBSGDByNorm, lr=0.1, momentum=0.9, weight_decay=0.01, batch_scale=2, batch_size=6),
    "groupadagrad": of(GroupAdaGrad, lr=0.1, **LIMITED),
    "lamb": of(LAMB, lr=0.01, weight_decay=0.1),
}
ON_SERVERS = ELEMENTWISE | BY_NORM
ALL = ON_SERVERS | {"sgld": of(SGLD, lr=1e-4, weight_decay=0.1, seed=5)}


def falling(optimizer: Any) -> LambdaLR:
    """Return a schedule that ends with a rate of 0, which changes nothing."""
    return LambdaLR(optimizer, lambda step: 1 - step / (STEPS - 1))


# --- one worker


@pytest.mark.parametrize("name", ALL)
def test_one_worker_is_the_plain_loop(name: str) -> None:
    """Bit for bit in every store. Servers divide the keys of element-wise optimizers only."""
    loop = Loop(seeded(Net), ALL[name], falling)
    data = batches(STEPS)
    expected = loop.plain(data)
    assert differs(expected, snapshot(loop.model))
    assert all(value.isfinite().all() for value in expected.values())
    stores = STORES if name in ON_SERVERS else ("local", "device")
    servers = 3 if name in ELEMENTWISE else 1
    for store in stores:
        more = {} if store in ("local", "device") else {"num_servers": servers}
        assert_same_bits(on_one_worker(lambda kv: loop.worker(kv, data), store, **more), expected)


class Long(nn.Module):
    """Has a key with more elements than fit into one frame."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 17_001), nn.Linear(17_001, 5, bias=False))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.net(images)
        return logits


def test_a_norm_includes_all_frames_of_a_key() -> None:
    loop = Loop(seeded(Long), BY_NORM["lars-momentum"])
    data = batches(2)
    found = on_one_worker(lambda kv: loop.worker(kv, data), "dist_sync", num_servers=1, transport=TcpTransport())
    assert_same_bits(found, loop.plain(data))


# --- several workers


def on_rank(kv: KVStore, loop: Loop, parts: list[list[Batch]]) -> State:
    return loop.worker(kv, parts[kv.rank])


def on_group(store: str, makers: dict[str, MakeOptimizer]) -> list[dict[str, State]]:
    """Return the final state of every worker of a group, by optimizer."""
    loops = {name: Loop(seeded(Net), make, falling) for name, make in makers.items()}

    def program(kv: KVStore, loop: Loop) -> State:
        return loop.worker(kv, parts_of(PARTS)[kv.rank])

    found: list[dict[str, State]] = [{} for _ in PARTS]
    for name, loop in loops.items():
        for rank, state in enumerate(run(partial(program, loop=loop), store, num_workers=len(PARTS))):
            found[rank][name] = state
    return found


@pytest.mark.long
def test_a_group_agrees_however_updates_are_divided() -> None:
    """Updating parts (nccl) equals updating the whole, bit for bit. Smooth rules equal one process with all batches."""
    first, second = on_group("nccl_allreduce", ALL)
    parts = on_group("nccl", ELEMENTWISE)
    for name in ALL:
        assert_same_bits(first[name], second[name])
        if name in ELEMENTWISE:
            assert_same_bits(first[name], parts[0][name])
            assert_same_bits(first[name], parts[1][name])
        if not name.startswith("sign"):
            expected = Loop(seeded(Net), ALL[name], falling).plain(joined(parts_of(PARTS)))
            # Several of them divide by the root of a small number.
            tolerance = tolerances.of_training(joined(parts_of(PARTS)), magnification=10)
            assert largest_difference(first[name], expected) < tolerance, name


def test_one_server_equals_one_process_with_the_joined_batch() -> None:
    """Two workers give the result of one process, up to the order of sums."""
    for name in ("sgd", "nag", "lbsgd", "ftml", "dcasgd-momentum", *BY_NORM):
        loop = Loop(seeded(Net).double(), ON_SERVERS[name])
        parts = [batches(STEPS, size, seed=rank, dtype=torch.float64) for rank, size in enumerate(PARTS)]
        found = run_with_servers(partial(on_rank, loop=loop, parts=parts), "dist_sync", num_servers=1)
        assert_same_bits(found[0], found[1])
        tolerance = tolerances.of_training(joined(parts), magnification=10)
        assert largest_difference(found[0], loop.plain(joined(parts))) < tolerance, name


# --- by MXNet's names


def test_a_store_takes_mxnets_names_and_settings() -> None:
    """The gradient is summed over two workers, rescaled and clipped, and every second push makes a step."""
    settings: dict[str, Any] = {"learning_rate": 0.1, "wd": 0.01, "rescale_grad": 0.25, "clip_gradient": 0.6}
    settings |= {"momentum": 0.9, "batch_scale": 2, "warmup_epochs": 1, "updates_per_epoch": 3}
    first, gradient = torch.linspace(-1, 1, 130), torch.linspace(-3, 2, 130)

    def program(kv: KVStore) -> torch.Tensor:
        kv.init("w", first)
        kv.set_optimizer("LBSGD", style="mxnet", **settings)
        found = torch.empty(130)
        for step in range(4):
            kv.pushpull("w", gradient * (step + kv.rank), found)
        return found

    parameter = nn.Parameter(first.clone())
    optimizer = create("lbsgd", [parameter], **settings)
    for step in range(4):
        parameter.grad = gradient * (2 * step + 1)
        optimizer.step()
    for found in run_with_servers(program, "dist_sync", num_workers=2, num_servers=2):
        torch.testing.assert_close(found, parameter.detach())


# --- states


@pytest.mark.parametrize("name", ON_SERVERS)
def test_a_state_continues_in_another_store(name: str) -> None:
    """Two steps in one process, two on a server and two in one process equal six of the plain loop, bit for bit."""
    data = batches(6)
    expected = Loop(seeded(Net), ON_SERVERS[name]).plain(data)

    def part(kv: KVStore, weights: State, state: State | None, chosen: list[Batch]) -> tuple[State, State]:
        torch.set_num_threads(1)
        model = copy.deepcopy(seeded(Net))
        with echelon.Trainer(model, ON_SERVERS[name](model), kv) as trainer:
            trainer.load_weights(weights)
            if state is not None:
                trainer.load_optimizer_state(state)
            take_steps(model, trainer, chosen)
            return snapshot(model), trainer.optimizer_state()

    weights, state = snapshot(seeded(Net)), None
    for store, chosen in (("local", data[:2]), ("dist_sync", data[2:4]), ("device", data[4:])):
        more = {"num_servers": 1} if store == "dist_sync" else {}
        program = partial(part, weights=weights, state=state, chosen=chosen)
        weights, state = on_one_worker(program, store, **more)
    assert_same_bits(weights, expected)


def test_sgld_continues_with_the_same_noise() -> None:
    data = batches(4)
    loop = Loop(seeded(Net), ALL["sgld"])
    model = copy.deepcopy(loop.model)
    with echelon.Trainer(model, loop.optimizer(model), "local") as trainer:
        take_steps(model, trainer, data[:2])
        weights, state = snapshot(model), trainer.optimizer_state()
    model = Net()
    with echelon.Trainer(model, loop.optimizer(model), "local") as trainer:
        trainer.load_weights(weights)
        trainer.load_optimizer_state(state)
        take_steps(model, trainer, data[2:])
    assert_same_bits(snapshot(model), loop.plain(data))


# --- rejected uses


def test_nccl_rejects_rules_that_need_whole_parameters() -> None:
    def program(kv: KVStore) -> None:
        for name in (*BY_NORM, "sgld"):
            model = seeded(Net)
            with pytest.raises(
                UsageError, match="cannot run on shards of tensors, which nccl uses; use nccl_allreduce"
            ):
                echelon.Trainer(model, ALL[name](model), kv)
        with pytest.raises(UsageError, match="lamb needs whole values, which nccl shards"):
            kv.set_optimizer("lamb")

    run(program, "nccl")


def test_servers_reject_sgld() -> None:
    def program(kv: KVStore) -> None:
        model = seeded(Net)
        with pytest.raises(UsageError, match=r"SGLD cannot run on the servers: its noise is drawn in the worker"):
            echelon.Trainer(model, ALL["sgld"](model), kv)

    on_one_worker(program, "dist_sync", num_servers=1)
