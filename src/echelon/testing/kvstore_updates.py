"""Checks of updates: rounds with an optimizer, its settings, its saved state, and who waits for whom."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from echelon.kvstore import KVStore
from echelon.schemes import store_kind
from echelon.testing.assertions import assert_equal, assert_tensor
from echelon.testing.trial import Trial, pull_all_pushes, rank_order_sum, sum_of_pushes

RATE = 2.0
TIMEOUT_S = 30.0
BIG = (1200, 1200)
SIZES = (100_003, 5, 64)  # the first key is split over servers, the other two are not
_OPTIMIZERS: tuple[tuple[str, type[Optimizer], dict[str, Any]], ...] = (
    ("sgd", SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2}),
    ("adam", Adam, {"lr": 0.01, "betas": (0.8, 0.9), "amsgrad": True}),
    ("adamw", AdamW, {"lr": 0.01, "weight_decay": 0.1}),
)


def updates_add_up_over_rounds(trial: Trial) -> None:
    """If worker r pushes r + 1, a weight is (W+1)·W·rate/2·(i+1) + 1 after i + 1 rounds, as in MXNet's own test."""
    workers = trial.num_workers

    def program(kv: KVStore) -> None:
        outs = [torch.empty(2, 3), torch.empty(BIG), torch.empty(2, 3, dtype=torch.float16)]
        names = [3, 99, 7]
        kv.init(names, [torch.ones_like(out) for out in outs])
        kv.set_optimizer("sgd", lr=RATE, maximize=True)
        for number in range(3):
            kv.push(names, [torch.full_like(out, kv.rank + 1) for out in outs])
            pull_all_pushes(kv, names, outs)
            for name, out in zip(names, outs, strict=True):
                assert_tensor(
                    f"key {name} after {number + 1} rounds", out, sum_of_pushes(workers) * RATE * (number + 1) + 1
                )

    trial(program)


def pushes_without_pulls_are_separate_updates(trial: Trial) -> None:
    """Three pushes in a row are three updates, and the pushed tensors may change as soon as `push` returns."""
    workers = trial.num_workers

    def program(kv: KVStore) -> None:
        outs = [torch.empty(2, 3), torch.empty(BIG)]
        kv.init([3, 99], [torch.ones_like(out) for out in outs])
        kv.set_optimizer("sgd", lr=RATE, maximize=True)
        values = [torch.empty_like(out) for out in outs]
        for number in range(3):
            for value in values:
                value.fill_((kv.rank + 1.0) * (number + 1))
            kv.push([3, 99], values)
        for value in values:
            value.fill_(float("nan"))
        pull_all_pushes(kv, [3, 99], outs)
        for out in outs:
            assert_tensor("after three pushes", out, sum_of_pushes(workers) * RATE * (1 + 2 + 3) + 1)

    for servers in {trial.num_servers, min(1, trial.num_servers)}:  # a single server does not split the large key
        trial(program, num_servers=servers)


def optimizers_match_torch(trial: Trial) -> None:
    """The optimizer gets the sum as gradient and gives the bits of torch.optim, by name and as an instance."""
    for name, kind, settings in _OPTIMIZERS:

        def program(kv: KVStore, name: str = name, settings: dict[str, Any] = settings) -> list[Tensor]:
            kv.set_optimizer(name, **settings)
            return _train(kv, range(4))

        def program_of_instance(
            kv: KVStore, kind: type[Optimizer] = kind, settings: dict[str, Any] = settings
        ) -> list[Tensor]:
            kv.set_optimizer(kind([torch.nn.Parameter(torch.zeros(1))], **settings))
            return _train(kv, range(4))

        results = trial(program) if trial.lock_step else [trial.alone(program)]
        expected = _trained_by_torch(kind, settings, len(results))
        for rank, weights in enumerate([*results, trial.alone(program_of_instance)]):
            wanted = expected if rank < len(results) else _trained_by_torch(kind, settings, 1)
            for size, weight, want in zip(SIZES, weights, wanted, strict=True):
                assert_tensor(f"{name}, {size} elements, worker {rank}", weight, want)


def optimizer_states_can_be_saved_and_loaded(trial: Trial) -> None:
    """A job that loads saved states continues bit for bit, also with another number of servers."""
    run: Callable[..., Any] = (lambda program, **more: trial(program, **more)[0]) if trial.lock_step else trial.alone
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "optimizer.states"

        def whole(kv: KVStore) -> list[Tensor]:
            kv.set_optimizer("adam", lr=0.01)
            return _train(kv, range(5))

        def first_half(kv: KVStore) -> list[Tensor]:
            kv.set_optimizer("adam", lr=0.01)
            weights = _train(kv, range(2))
            if kv.rank == 0 or trial.collective:
                kv.save_optimizer_states(file)
            kv.barrier()
            return weights

        halfway = run(first_half)
        assert_equal("only the file is written", [path.name for path in file.parent.iterdir()], [file.name])

        def second_half(kv: KVStore) -> list[Tensor]:
            kv.init(_names(), halfway)
            kv.set_optimizer("adam", lr=0.01)
            if kv.rank == 0 or trial.collective:
                kv.load_optimizer_states(file)
            kv.barrier()
            return _train(kv, range(2, 5), init=False)

        expected = run(whole)
        for servers in (trial.num_servers, *(() if trial.collective else (1, trial.num_servers + 1))):
            for size, weight, want in zip(SIZES, run(second_half, num_servers=servers), expected, strict=True):
                assert_tensor(f"{size} elements on {servers} servers", weight, want)


def workers_wait_only_as_the_scheme_requires(trial: Trial) -> None:
    """A worker waits only if its scheme requires it, or this check hangs; a pull has every update it guarantees."""
    if trial.num_workers < 2 or trial.lock_step:
        return
    lead, workers = trial.options.get("staleness", 5), trial.num_workers

    def program(kv: KVStore) -> None:
        kv.init("w", torch.zeros(1))
        kv.set_optimizer("sgd", lr=1.0, maximize=True)
        out = torch.zeros(1)
        if kv.rank == 0:
            for number in range(lead):
                kv.pushpull("w", torch.ones(1), out)
                assert_tensor("own updates are visible at once", out, number + 1.0)
        kv.barrier()
        if kv.rank == 0:
            kv.pushpull("w", torch.ones(1), out)
            if store_kind(trial.store).scheme == "SSP":
                assert_tensor("updates beyond the staleness bound are visible", out, 1000.0 * (workers - 1) + lead + 1)
        else:
            deadline = time.monotonic() + TIMEOUT_S
            while float(out) % 1000 != lead + 1 and time.monotonic() < deadline:
                kv.pull("w", out)  # until rank 0 has pushed; it may be waiting now
            kv.push("w", torch.full((1,), 1000.0))
        kv.barrier()

    trial(program)


def _names() -> list[str]:
    return [f"key {size}" for size in SIZES]


def _gradient(rank: int, step: int, size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1000 * rank + 10 * step + size % 7))


def _start() -> list[Tensor]:
    return [_gradient(99, 0, size) for size in SIZES]


def _train(kv: KVStore, steps: range, init: bool = True) -> list[Tensor]:
    weights = _start()
    if init:
        kv.init(_names(), weights)
    for step in steps:
        kv.pushpull(_names(), [_gradient(kv.rank, step, size) for size in SIZES], out=weights)
    return weights


def _trained_by_torch(kind: type[Optimizer], settings: dict[str, Any], workers: int) -> list[Tensor]:
    weights = [torch.nn.Parameter(weight) for weight in _start()]
    optimizer = kind(weights, **settings)
    for step in range(4):
        for weight, size in zip(weights, SIZES, strict=True):
            weight.grad = rank_order_sum([_gradient(rank, step, size) for rank in range(workers)])
        optimizer.step()
    return [weight.detach() for weight in weights]
