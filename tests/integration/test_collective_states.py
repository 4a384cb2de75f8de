"""The state of a Trainer without servers, moved between stores; and mistakes in a group of processes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from collective_loops import ELEMENTWISE, largest_difference
from plain_loops import (
    Loop,
    Net,
    State,
    assert_same_bits,
    batches,
    joined,
    loss_of,
    parts_of,
    seeded,
    snapshot,
    two_groups,
    usage_error,
)
from torch import nn
from torch.optim import SGD

import echelon
import tolerances
from echelon.environment import Job
from echelon.errors import JobError, UsageError
from echelon.kvstore import KVStore, create
from echelon.launch.supervision.processes import free_port
from echelon.launch.threads.in_process import run as run_with_servers
from forked import run

pytestmark = pytest.mark.numeric


def half_way(kv: KVStore, loop: Loop, given: tuple[State, State] | None = None) -> tuple[State, State, State]:
    """Make two steps, from the start or from `given`. Return weights and state then, and weights two steps later."""
    model = copy.deepcopy(loop.model)
    data = parts_of((4, 3), steps=4)[kv.rank]
    with echelon.Trainer(model, loop.optimizer(model), kv) as trainer:
        if given is not None:
            trainer.load_weights(given[0])
            trainer.load_optimizer_state(given[1])
        for batch in data[2 if given else 0 :]:
            if trainer.clock == 2 and not given:
                middle = snapshot(model), trainer.optimizer_state()
            loss_of(model, batch).backward()
            trainer.step()
        trainer.sync()
        kv.barrier()
        if given is not None:
            middle = given
        return *middle, snapshot(model)


@pytest.mark.parametrize(
    "name",
    [
        "adam",
        pytest.param("sgd", marks=pytest.mark.long),
        pytest.param("rmsprop", marks=pytest.mark.long),
        pytest.param("adagrad", marks=pytest.mark.long),
    ],
)
def test_a_state_can_move_from_any_store_to_any_other(name: str) -> None:
    """Bit for bit between stores without servers; servers weight gradients in another order of operations."""
    loop = Loop(seeded(Net), ELEMENTWISE[name])
    runs: dict[str, Callable[..., Any]] = {"nccl": run, "nccl_allreduce": run, "dist_async": run_with_servers}
    results = {
        store: launch(lambda kv: half_way(kv, loop), "dist_sync" if store == "dist_async" else store, num_workers=2)
        for store, launch in runs.items()
    }
    kinds = results["nccl"][0][1].keys()
    assert any(name.startswith("middle.weight/") for name in kinds)
    for saved in results.values():
        for weights, state, _ in saved:
            assert state.keys() == kinds
            assert state["middle.weight/" + next(iter(kinds)).rpartition("/")[2]].device.type == "cpu"
            assert_same_bits(weights, saved[0][0])
    expected = results["nccl"][0][2]
    for source, saved in results.items():
        for target, launch in runs.items():
            store = "dist_sync" if target == "dist_async" else target
            found = launch(lambda kv, saved=saved: half_way(kv, loop, saved[0][:2]), store, num_workers=2)
            if "dist_async" in (source, target):
                # rmsprop and Adam divide by the root of a small number.
                tolerance = tolerances.of_training(joined(parts_of((4, 3))), magnification=10)
                assert largest_difference(found[0][2], expected) < tolerance
            else:
                assert_same_bits(found[0][2], expected)


def test_a_process_alone_has_the_state_of_torch() -> None:
    model = seeded(Net)
    optimizer = two_groups(model)
    with echelon.Trainer(model, optimizer, "device") as trainer:
        assert trainer.optimizer_state() == {}
        loss_of(model, batches(1)[0]).backward()
        trainer.step()
        state = trainer.optimizer_state()
        assert state.keys() == {f"{name}/momentum_buffer" for name, _ in model.named_parameters()}
        trainer.load_optimizer_state({name: tensor * 2 for name, tensor in state.items()})
        buffer = optimizer.state[model.get_parameter("last.bias")]["momentum_buffer"]
        assert torch.equal(buffer, state["last.bias/momentum_buffer"] * 2)
        for bad, said in (
            ({"nowhere/momentum_buffer": torch.ones(1)}, "'nowhere', which this model does not train"),
            ({"last.bias/momentum_buffer": torch.ones(6)}, r"momentum_buffer of 'last.bias' is \(6,\), .* is \(5,\)"),
        ):
            with pytest.raises(UsageError, match=said):
                trainer.load_optimizer_state(bad)


def test_mistakes_in_a_group() -> None:
    def program(kv: KVStore) -> list[str]:
        said = []
        model = seeded(Net)
        for optimizer in (torch.optim.Adafactor(model.parameters()), torch.optim.LBFGS(model.parameters())):
            said.append(usage_error(partial(echelon.Trainer, model, optimizer, kv)))
        trainer = echelon.Trainer(model, two_groups(model), kv, check_finite=True)
        batch = batches(1)[0]
        loss_of(model, batch).backward()
        for wrong in (lambda: loss_of(model, batch).backward(), lambda: trainer.step(7), lambda: trainer.update()):
            said.append(usage_error(wrong))
        trainer.zero_grad()  # discards what the second backward pass added
        trainer.step()
        loss_of(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        return [*said, usage_error(trainer.step)]

    for rank, said in enumerate(run(program, "nccl", num_workers=2)):
        for text, words in zip(
            said,
            (
                "Adafactor cannot run on shards of tensors, which nccl uses; use nccl_allreduce",
                "LBFGS cannot run on shards of tensors",
                f"worker {rank}: a second backward pass before step()",
                "step(7), but the forward pass saw 6 samples",
                "nccl communicates in every step",
                "nccl had sent it during backward; to clip, pass Trainer(max_grad_norm=…), or use nccl_allreduce",
            ),
            strict=True,
        ):
            assert words in text


def test_models_that_differ_are_an_error() -> None:
    def program(kv: KVStore) -> str:
        model = nn.Linear(3, 2 + kv.rank)
        if kv.rank == 0:
            kv.group.check_same("the model's parameters", "weight (2, 3)")  # type: ignore[attr-defined]
            return ""
        return usage_error(lambda: echelon.Trainer(model, SGD(model.parameters(), lr=0.1), kv))

    said = run(program, "nccl_allreduce", num_workers=2)[1]
    assert said.startswith(
        "worker 0, device 1: the model's parameters must be the same on all: worker 0, device 0 has "
    )
    assert "has weight (2, 3), this process has bias (3,)" in said


def test_a_rank_that_does_not_arrive_is_named() -> None:
    with pytest.raises(JobError, match=r"worker 0, device 1 did not arrive at 127.0.0.1:\d+ in 1 s"):
        create("nccl", job=Job(num_devices=2, device_port=free_port(), timeout_s=1.0))
