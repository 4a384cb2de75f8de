"""The optimizers of echelon.optim: the bits of a plain loop under every store, states that travel, and refusals."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from collective_loops import joined, largest_difference, train
from plain_loops import (
    STORES,
    Batch,
    Loop,
    MakeOptimizer,
    Net,
    State,
    assert_same_bits,
    batches,
    differs,
    loss_of,
    on_one_worker,
    seeded,
    snapshot,
)
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import echelon
import tolerances
from echelon.errors import UsageError
from echelon.kvstore import KVStore
from echelon.launch.in_process import run as run_with_servers
from echelon.optim import DCASGD, FTML, LAMB, LARS, LBSGD, SGLD, Accumulate, Ftrl, Signum
from echelon.transport import TcpTransport
from forked import run

STEPS = 4
PARTS = (4, 3)  # batches of two workers


def of(kind: Any, **settings: Any) -> MakeOptimizer:
    """Biases are a group by themselves, which does not decay."""

    def make(model: nn.Module) -> Any:
        named = list(model.named_parameters())
        groups = [
            {"params": [p for name, p in named if "bias" not in name]},
            {"params": [p for name, p in named if "bias" in name], "weight_decay": 0.0},
        ]
        return kind(groups, **settings)

    return make


ELEMENTWISE: dict[str, MakeOptimizer] = {
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
    "lbsgd": of(LBSGD, lr=0.1, momentum=0.9, weight_decay=0.01, batch_size=6),
    "lamb": of(LAMB, lr=0.01, weight_decay=0.1),
}
SERVED = ELEMENTWISE | BY_NORM
ALL = SERVED | {"sgld": of(SGLD, lr=1e-4, weight_decay=0.1, seed=5)}


def falling(optimizer: Any) -> LambdaLR:
    """To a rate of 0, which changes nothing."""
    return LambdaLR(optimizer, lambda step: 1 - step / (STEPS - 1))


# --- one worker


@pytest.mark.parametrize("name", ALL)
def test_one_worker_is_the_plain_loop(name: str) -> None:
    """To the bit in every store; elements are cut over servers, keys of norms are not."""
    loop = Loop(seeded(Net), ALL[name], falling)
    data = batches(STEPS)
    expected = loop.plain(data)
    assert differs(expected, snapshot(loop.model))
    assert all(value.isfinite().all() for value in expected.values())
    stores = STORES if name in SERVED else ("local", "device")
    servers = 3 if name in ELEMENTWISE else 1
    for store in stores:
        more = {} if store in ("local", "device") else {"num_servers": servers}
        assert_same_bits(on_one_worker(lambda kv: loop.worker(kv, data), store, **more), expected)


class Long(nn.Module):
    """A key of more elements than a frame has."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 17_001), nn.Linear(17_001, 5, bias=False))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.net(images)
        return logits


def test_a_norm_is_of_all_frames_of_a_key() -> None:
    loop = Loop(seeded(Long), BY_NORM["lars-momentum"])
    data = batches(2)
    found = on_one_worker(lambda kv: loop.worker(kv, data), "dist_sync", num_servers=1, transport=TcpTransport())
    assert_same_bits(found, loop.plain(data))


# --- several workers


def parts_of() -> list[list[Batch]]:
    return [batches(STEPS, size, seed=rank + 1) for rank, size in enumerate(PARTS)]


def on_group(store: str, makers: dict[str, MakeOptimizer]) -> list[dict[str, State]]:
    """What every worker of a group ends with, by optimizer."""
    loops = {name: Loop(seeded(Net), make, falling) for name, make in makers.items()}

    def program(kv: KVStore, loop: Loop) -> State:
        return train(kv, loop, parts_of()[kv.rank])

    found: list[dict[str, State]] = [{} for _ in PARTS]
    for name, loop in loops.items():
        for rank, state in enumerate(run(lambda kv, loop=loop: program(kv, loop), store, num_workers=len(PARTS))):
            found[rank][name] = state
    return found


def test_a_group_agrees_whoever_updates_what() -> None:
    """nccl's parts give the bits of the whole, and all that is smooth is one process on the joined batch."""
    first, second = on_group("nccl_allreduce", ALL)
    parts = on_group("nccl", ELEMENTWISE)
    for name in ALL:
        assert_same_bits(first[name], second[name])
        if name in ELEMENTWISE:
            assert_same_bits(first[name], parts[0][name])
            assert_same_bits(first[name], parts[1][name])
        if not name.startswith("sign"):
            expected = Loop(seeded(Net), ALL[name], falling).plain(joined(parts_of()))
            # Several of them divide by the root of a small number.
            tolerance = tolerances.of_training(joined(parts_of()), magnification=10)
            assert largest_difference(first[name], expected) < tolerance, name


def test_servers_sum_for_them_too() -> None:
    """Two workers on one server are one process on the joined batch, up to the order of sums."""
    for name in ("ftml", "dcasgd-momentum", *BY_NORM):
        loop = Loop(seeded(Net).double(), SERVED[name])
        parts = [batches(STEPS, size, seed=rank, dtype=torch.float64) for rank, size in enumerate(PARTS)]
        found = run_with_servers(
            lambda kv, loop=loop, parts=parts: loop.worker(kv, parts[kv.rank]), "dist_sync", num_servers=1
        )
        assert_same_bits(found[0], found[1])
        tolerance = tolerances.of_training(joined(parts), magnification=10)
        assert largest_difference(found[0], loop.plain(joined(parts))) < tolerance, name


# --- states


@pytest.mark.parametrize("name", SERVED)
def test_a_state_goes_on_in_another_store(name: str) -> None:
    """Two steps in one process, two on a server, two in one process again: six of the plain loop, to the bit."""
    data = batches(6)
    expected = Loop(seeded(Net), SERVED[name]).plain(data)

    def part(kv: KVStore, weights: State, state: State | None, chosen: list[Batch]) -> tuple[State, State]:
        torch.set_num_threads(1)
        model = copy.deepcopy(seeded(Net))
        with echelon.Trainer(model, SERVED[name](model), kv) as trainer:
            trainer.load_weights(weights)
            if state is not None:
                trainer.load_optimizer_state(state)
            for batch in chosen:
                loss_of(model, batch).backward()
                trainer.step(len(batch[0]))
            return snapshot(model), trainer.optimizer_state()

    weights, state = snapshot(seeded(Net)), None
    for store, chosen in (("local", data[:2]), ("dist_sync", data[2:4]), ("device", data[4:])):
        more = {"num_servers": 1} if store == "dist_sync" else {}
        weights, state = on_one_worker(
            lambda kv, weights=weights, state=state, chosen=chosen: part(kv, weights, state, chosen), store, **more
        )
    assert_same_bits(weights, expected)


def test_sgld_goes_on_with_the_same_noise() -> None:
    data = batches(4)
    loop = Loop(seeded(Net), ALL["sgld"])
    model = copy.deepcopy(loop.model)
    with echelon.Trainer(model, loop.optimizer(model), "local") as trainer:
        for batch in data[:2]:
            loss_of(model, batch).backward()
            trainer.step()
        weights, state = snapshot(model), trainer.optimizer_state()
    model = Net()
    with echelon.Trainer(model, loop.optimizer(model), "local") as trainer:
        trainer.load_weights(weights)
        trainer.load_optimizer_state(state)
        for batch in data[2:]:
            loss_of(model, batch).backward()
            trainer.step()
    assert_same_bits(snapshot(model), loop.plain(data))


# --- what cannot be


@pytest.mark.parametrize("name", BY_NORM)
def test_servers_that_cut_parameters_refuse_norms(name: str) -> None:
    def program(kv: KVStore) -> None:
        model = seeded(Net)
        with pytest.raises(UsageError, match=r"needs the norm of whole parameters, which 2 servers cut: .*\(-s 1\)"):
            echelon.Trainer(model, BY_NORM[name](model), kv)

    on_one_worker(program, "dist_sync")


def test_nccl_refuses_what_looks_at_whole_parameters() -> None:
    def program(kv: KVStore) -> None:
        for name in (*BY_NORM, "sgld"):
            model = seeded(Net)
            with pytest.raises(UsageError, match="cannot run on parts of tensors, as nccl does; use nccl_allreduce"):
                echelon.Trainer(model, ALL[name](model), kv)
        with pytest.raises(UsageError, match="lamb needs the norm of whole values, which nccl shards"):
            kv.set_optimizer("lamb")

    run(program, "nccl")


def test_servers_do_not_know_sglds_noise() -> None:
    def program(kv: KVStore) -> None:
        model = seeded(Net)
        with pytest.raises(UsageError, match=r"SGLD cannot run on the servers; use one of SGD, .*Signum, FTML"):
            echelon.Trainer(model, ALL["sgld"](model), kv)

    on_one_worker(program, "dist_sync", num_servers=1)
