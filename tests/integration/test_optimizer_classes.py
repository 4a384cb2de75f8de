"""Every class of torch.optim on servers, and those of echelon.optim that need whole tensors."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizer_cases import CASES, plain, steps, trained
from plain_loops import (
    State,
    assert_close,
    assert_same_bits,
    batches,
    joined,
    loss_of,
    parts_of,
    seeded,
    snapshot,
)
from torch import Tensor, nn

import echelon
import tolerances
from echelon.errors import UsageError
from echelon.kvstore import KVStore, create
from echelon.launch.threads.in_process import run
from echelon.transport.sockets import TcpTransport

pytestmark = pytest.mark.numeric

STEPS = 5


@pytest.mark.parametrize("num_servers", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_one_worker_gives_plain_torchs_bits(name: str, num_servers: int) -> None:
    case = CASES[name]
    model = seeded(case.model)
    data = batches(STEPS)
    expected = plain(case, model, data)
    assert any(not torch.equal(value, expected[key]) for key, value in model.state_dict().items())
    assert_same_bits(trained(case, model, [data], num_servers=num_servers), expected)


@pytest.mark.parametrize("name", CASES)
def test_two_workers_equal_one_process_on_the_joined_batch(name: str) -> None:
    case = CASES[name]
    model = seeded(case.model).double()
    sizes = [5, 3]
    parts = parts_of(sizes, STEPS, dtype=torch.float64)
    bound = tolerances.reordering(torch.float64, terms=sum(sizes), steps=STEPS) * 1e3
    assert_close(trained(case, model, parts), plain(case, model, joined(parts)), bound)


@pytest.mark.parametrize("name", CASES)
def test_states_survive_a_new_job_with_another_number_of_servers(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model, data = seeded(case.model), batches(STEPS)
    expected = plain(case, model, data)
    states: dict[str, Tensor] = {}

    def first(kv: KVStore) -> State:
        torch.set_num_threads(1)
        own = copy.deepcopy(model)
        with echelon.Trainer(own, case.make(own), kv) as trainer:
            steps(case, trainer, data[:3])
            states.update(trainer.optimizer_state())
            kv.save_optimizer_states(tmp_path / "states")
            return snapshot(own)

    weights = run(first, "dist_sync", num_workers=1, num_servers=2)[0]

    def second(kv: KVStore) -> State:
        torch.set_num_threads(1)
        own = copy.deepcopy(model)
        optimizer = case.make(own)
        for number in range(3):
            case.set(optimizer, number)
        with echelon.Trainer(own, optimizer, kv) as trainer:
            trainer.load_weights(weights)
            kv.load_optimizer_states(tmp_path / "states")
            loaded = trainer.optimizer_state()
            assert loaded.keys() == states.keys()
            assert all(torch.equal(loaded[key], state) for key, state in states.items())
            steps(case, trainer, data[3:], first=3)
            return snapshot(own)

    assert_same_bits(run(second, "dist_sync", num_workers=1, num_servers=3)[0], expected)


@pytest.mark.parametrize("name", CASES)
def test_the_state_is_that_of_torch(name: str) -> None:
    """By the same names, of the same shapes, dtypes and bits as the optimizer in a plain loop has."""
    case = CASES[name]
    model, data = seeded(case.model), batches(2)
    own = copy.deepcopy(model)
    optimizer = case.make(own)
    for number, batch in enumerate(data):
        case.set(optimizer, number)
        loss_of(own, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = {
        f"{key}/{kind}": torch.as_tensor(value)
        for key, parameter in own.named_parameters()
        for kind, value in optimizer.state[parameter].items()
    }

    def program(kv: KVStore) -> State:
        torch.set_num_threads(1)
        mine = copy.deepcopy(model)
        with echelon.Trainer(mine, case.make(mine), kv) as trainer:
            steps(case, trainer, data)
            return trainer.optimizer_state()

    found = run(program, "dist_sync", num_workers=1)[0]
    assert found.keys() == expected.keys()
    for key, state in found.items():
        assert (state.shape, state.dtype) == (expected[key].shape, expected[key].dtype), key
        assert torch.equal(state, expected[key]), key


@pytest.mark.parametrize("transport", [None, TcpTransport])
@pytest.mark.parametrize("name", ["lamb", "adafactor", "nadam"])
def test_a_store_without_a_trainer_runs_them_by_name(name: str, transport: Any) -> None:
    gradients = [torch.randn(1100, 1200), torch.randn(7)]  # the first has more than one frame

    def program(kv: KVStore) -> list[Tensor]:
        kv.set_optimizer(name, lr=0.1)
        kv.init(["a", "b"], [torch.ones(1100, 1200), torch.ones(7)])
        outs = [torch.empty(1100, 1200), torch.empty(7)]
        for _ in range(2):
            kv.push(["a", "b"], gradients)
        kv.pull(["a", "b"], outs)
        return outs

    with create("local") as kv:
        expected = program(kv)
    found = run(program, "dist_sync", num_workers=1, transport=transport() if transport else None)[0]
    assert all(map(torch.equal, found, expected))


def test_keys_that_were_cut_cannot_be_updated_as_a_whole() -> None:
    def program(kv: KVStore) -> None:
        kv.init("w", torch.ones(1000, 100))
        with pytest.raises(
            UsageError, match=r"lamb needs whole parameters, but key 'w' was spread over 2 servers by init"
        ):
            kv.set_optimizer("lamb", lr=0.1)

    run(program, "dist_sync", num_workers=1)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (torch.optim.LBFGS, "LBFGS cannot run on the servers: a step evaluates the loss several times"),
        (echelon.optim.SGLD, "SGLD cannot run on the servers: its noise is drawn in the worker"),
    ],
)
def test_a_class_that_servers_cannot_run_is_refused(kind: Any, words: str) -> None:
    def program(kv: KVStore) -> None:
        model = nn.Linear(2, 2)
        with pytest.raises(UsageError, match=words):
            echelon.Trainer(model, kind(model.parameters()), kv)

    run(program, "dist_sync", num_workers=1)
