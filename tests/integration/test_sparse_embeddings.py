"""Embeddings with sparse gradients under a Trainer: plain PyTorch's bits with one worker, and what travels."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from plain_loops import State, assert_close, assert_same_bits, on_one_worker, snapshot, usage_error
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, Optimizer, RMSprop, SparseAdam

import echelon
from echelon.bench.rows import measure
from echelon.errors import UsageError
from echelon.kvstore import KVStore
from echelon.kvstore.servers.store import ServerStore
from echelon.launch.threads.in_process import run
from tolerances import reordering

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),  # of torch's own optimizers, in plain loops
]

ROWS, BAG_ROWS, WIDTH = 300, 130, 7
STEPS = 5
Batch = tuple[Tensor, Tensor, Tensor]


class Recommender(nn.Module):
    """Two tables: one is read by single rows, one by bags."""

    def __init__(self, dense: bool = True, width: int = WIDTH) -> None:
        super().__init__()
        self.users = nn.Embedding(ROWS, width, sparse=True)
        self.items = nn.EmbeddingBag(BAG_ROWS, width, mode="sum", sparse=True)
        self.head = nn.Linear(width, 1) if dense else nn.Identity()

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        output: Tensor = self.head(torch.tanh(self.users(users)) * self.items(items))
        return output.sum(1)


def batches(size: int, seed: int = 1, steps: int = STEPS) -> list[Batch]:
    """Return batches whose rows repeat, within a batch and between batches."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randint(0, 20, (size,), generator=generator) * 15,
            torch.randint(0, BAG_ROWS, (size, 3), generator=generator),
            torch.randn(size, generator=generator),
        )
        for _ in range(steps)
    ]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    users, items, target = batch
    return nn.functional.mse_loss(model(users, items), target)


def plain(model: nn.Module, make: Callable[[Any], Optimizer], data: list[Batch]) -> tuple[State, State]:
    """Train with plain PyTorch. Return the weights and the optimizer's state by parameter."""
    mine = copy.deepcopy(model)
    optimizer = make(mine.parameters())
    for batch in data:
        optimizer.zero_grad()
        loss_of(mine, batch).backward()
        optimizer.step()
    states = {
        f"{name}/{kind}": torch.as_tensor(value, dtype=torch.float32)
        for name, parameter in mine.named_parameters()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }
    return snapshot(mine), states


def worker(
    kv: KVStore, model: nn.Module, make: Callable[[Any], Optimizer], data: list[Batch], **options: Any
) -> tuple[State, State]:
    """Train as one worker. Return the weights and the servers' state."""
    torch.set_num_threads(1)
    mine = copy.deepcopy(model)
    trainer = echelon.Trainer(mine, make(mine.parameters()), kv, **options)
    for batch in data:
        loss_of(mine, batch).backward()
        trainer.step(len(batch[0]))
    weights = snapshot(mine)
    kv.barrier()
    states = trainer.optimizer_state()
    kv.barrier()
    trainer.close()
    return weights, states


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "sgd maximize": lambda p: SGD(p, lr=0.01, maximize=True),
    "adagrad": lambda p: Adagrad(p, lr=0.1, lr_decay=0.01, initial_accumulator_value=0.1),
    "sparse adam": lambda p: SparseAdam(list(p), lr=0.01),
}


def model_for(name: str, width: int = WIDTH) -> Recommender:
    torch.manual_seed(0)
    return Recommender(dense=name != "sparse adam", width=width)


@pytest.mark.parametrize("width", [1, 7, 16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_worker_has_the_bits_of_plain_pytorch(name: str, width: int) -> None:
    """Also where a batch names a row several times; and the state of a row that is not touched does not change."""
    model = model_for(name, width)
    data = batches(8)
    expected, expected_states = plain(model, OPTIMIZERS[name], data)
    weights, states = on_one_worker(lambda kv: worker(kv, model, OPTIMIZERS[name], data), "dist_sync")
    assert_same_bits(weights, expected)
    if name != "sgd" and name != "sgd maximize":
        assert_same_bits(states, expected_states)


@pytest.mark.parametrize("store", ["dist_async", "dist_ssync", "dist_gsync"])
def test_one_worker_of_a_relaxed_scheme(store: str) -> None:
    model, data = model_for("adagrad"), batches(8)
    weights, _ = on_one_worker(lambda kv: worker(kv, model, OPTIMIZERS["adagrad"], data), store)
    assert_same_bits(weights, plain(model, OPTIMIZERS["adagrad"], data)[0])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_several_workers_equal_one_process_on_the_joined_batch(name: str) -> None:
    model = model_for(name)
    sizes = (8, 3)
    parts = [batches(size, seed) for seed, size in enumerate(sizes)]
    joined = [tuple(torch.cat(tensors) for tensors in zip(*step, strict=True)) for step in zip(*parts, strict=True)]
    expected, _ = plain(model, OPTIMIZERS[name], joined)  # type: ignore[arg-type]
    results = run(lambda kv: worker(kv, model, OPTIMIZERS[name], parts[kv.rank]), "dist_sync", num_servers=3)
    assert_same_bits(results[1][0], results[0][0])
    magnification = 1.0 if "sgd" in name else 100.0  # the others divide by the root of a small number
    assert_close(results[0][0], expected, reordering(torch.float32, sum(sizes) * 3, STEPS, magnification))


@pytest.mark.parametrize(
    ("store", "options"),
    [
        ("dist_async", {}),
        ("dist_ssync", {"staleness": 1}),
        ("dist_gsync", {"groups": [[0, 1], [2]]}),
        ("dist_gsync", {"groups": [[0], [1], [2]]}),
    ],
)
@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_relaxed_schemes_learn_and_end_with_the_same_tables(store: str, options: dict[str, Any], name: str) -> None:
    model = model_for(name)
    steps = 30
    parts = [batches(8, seed, 3) for seed in range(3)]

    def total_loss(model: nn.Module) -> float:
        return sum(float(loss_of(model, batch).detach()) for part in parts for batch in part)

    def program(kv: KVStore) -> tuple[State, float, float]:
        torch.set_num_threads(1)
        mine = copy.deepcopy(model)
        optimizer = OPTIMIZERS[name](mine.parameters())
        with echelon.Trainer(mine, optimizer, kv) as trainer:
            before = total_loss(mine)
            for step in range(steps):
                loss_of(mine, parts[kv.rank][step % 3]).backward()
                trainer.step(8)
            kv.barrier()
            trainer.refresh()
            kv.barrier()
            return snapshot(mine), before, total_loss(mine)

    results = run(program, store, num_workers=3, **options)
    for weights, before, after in results:
        assert_same_bits(weights, results[0][0])
        assert after < before


def test_several_tables_in_parameter_groups() -> None:
    """The groups have their own learning rates, and one table has no gradient in some steps."""

    def make(model: nn.Module) -> Optimizer:
        users, items, *rest = model.parameters()
        groups: list[dict[str, Any]] = [{"params": [users]}, {"params": [items], "lr": 0.5}, {"params": rest}]
        return Adagrad(groups, lr=0.1)

    def loss_at(model: nn.Module, batch: Batch, step: int) -> Tensor:
        assert isinstance(model, Recommender)
        return loss_of(model, batch) if step % 2 else model.users(batch[0]).square().mean()

    model, data = model_for("adagrad"), batches(8)

    def program(kv: KVStore | None) -> State:
        torch.set_num_threads(1)
        mine = copy.deepcopy(model)
        optimizer = make(mine)
        trainer = echelon.Trainer(mine, optimizer, kv, overlap=False) if kv is not None else None
        for step, batch in enumerate(data):
            optimizer.zero_grad()
            loss_at(mine, batch, step).backward()
            if trainer is None:
                optimizer.step()
            else:
                trainer.step(8)
        if trainer is not None:
            trainer.close()
        return snapshot(mine)

    assert_same_bits(on_one_worker(program, "dist_sync"), program(None))


def test_adam_for_the_dense_part_and_sparse_adam_for_the_tables() -> None:
    """torch needs two optimizers for this, so there are two Trainers of one model."""
    model = model_for("adam")
    parts = [batches(8, seed) for seed in range(2)]
    joined = [tuple(torch.cat(tensors) for tensors in zip(*step, strict=True)) for step in zip(*parts, strict=True)]

    def optimizers(model: Recommender) -> tuple[Optimizer, Optimizer]:
        return Adam(model.head.parameters(), 0.01), SparseAdam([model.users.weight, model.items.weight], 0.01)

    def program(kv: KVStore) -> State:
        torch.set_num_threads(1)
        mine = copy.deepcopy(model)
        dense, sparse = optimizers(mine)
        with echelon.Trainer(mine, dense, kv) as first, echelon.Trainer(mine, sparse, "dist_sync") as second:
            for batch in parts[kv.rank]:
                loss_of(mine, batch).backward()
                first.step(len(batch[0]))
                second.step(len(batch[0]))
            return snapshot(mine)

    expected = copy.deepcopy(model)
    both = optimizers(expected)
    for batch in joined:
        for optimizer in both:
            optimizer.zero_grad()
        loss_of(expected, batch).backward()  # type: ignore[arg-type]
        for optimizer in both:
            optimizer.step()
    results = run(program, "dist_sync")
    assert_same_bits(results[1], results[0])
    assert_close(results[0], snapshot(expected), reordering(torch.float32, 48, STEPS, 100.0))


@pytest.mark.parametrize("name", ["adagrad", "sparse adam"])
def test_training_continues_from_a_saved_state(name: str) -> None:
    """Weights and states of tables are those of an uninterrupted run."""
    model, data = model_for(name), batches(8)

    def continued(kv: KVStore, weights: State, states: State) -> State:
        torch.set_num_threads(1)
        mine = copy.deepcopy(model)
        with echelon.Trainer(mine, OPTIMIZERS[name](mine.parameters()), kv) as trainer:
            trainer.load_weights(weights)
            trainer.load_optimizer_state(states)
            for batch in data[2:]:
                loss_of(mine, batch).backward()
                trainer.step(len(batch[0]))
            return snapshot(mine)

    weights, states = on_one_worker(lambda kv: worker(kv, model, OPTIMIZERS[name], data[:2]), "dist_sync")
    last = on_one_worker(lambda kv: continued(kv, weights, states), "dist_sync")
    assert_same_bits(last, plain(model, OPTIMIZERS[name], data)[0])


def test_the_bytes_of_a_step_follow_the_rows_that_it_touches() -> None:
    """They do not depend on the number of rows of the table."""

    def bytes_per_step(num_rows: int) -> list[float]:
        given = {"rows": num_rows, "width": 4, "steps": 2, "optimizer": "adagrad", "num_workers": 2, "num_servers": 2}
        return [cost.sent_bytes + cost.received_bytes for cost in measure(argparse.Namespace(**given))]

    small, large = bytes_per_step(2000), bytes_per_step(40_000)
    assert len(small) == 3  # 10, 100 and 1000 rows
    for one, other, touched in zip(small, large, (10, 100, 1000), strict=False):
        rows = 3 * touched * (8 + 4 * 4)  # one's own go, those of both workers come
        assert one < rows + 1000
        assert other < rows + 1000


def clamp_rows(model: nn.Module) -> None:
    """Edit the tables as loops do that keep weights small."""
    assert isinstance(model, Recommender)
    with torch.no_grad():
        model.users.weight.clamp_(-0.5, 0.5)
    model.items.weight.data.mul_(0.9)  # no version counter changes


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("edit", ["on its own", "edit_weights"])
def test_edits_of_tables_are_sent(num_workers: int, edit: str) -> None:
    model = model_for("adagrad")
    parts = [batches(8, seed) for seed in range(num_workers)]
    joined = [tuple(torch.cat(tensors) for tensors in zip(*step, strict=True)) for step in zip(*parts, strict=True)]

    def program(kv: KVStore) -> State:
        torch.set_num_threads(1)
        mine = copy.deepcopy(model)
        optimizer = OPTIMIZERS["adagrad"](mine.parameters())
        with echelon.Trainer(mine, optimizer, kv) as trainer:
            for batch in parts[kv.rank]:
                optimizer.zero_grad()
                loss_of(mine, batch).backward()
                optimizer.step()
                with trainer.edit_weights() if edit == "edit_weights" else nullcontext():
                    clamp_rows(mine)
            return snapshot(mine)

    expected = copy.deepcopy(model)
    optimizer = OPTIMIZERS["adagrad"](expected.parameters())
    for batch in joined:
        optimizer.zero_grad()
        loss_of(expected, batch).backward()  # type: ignore[arg-type]
        optimizer.step()
        clamp_rows(expected)
    results = run(program, "dist_sync", num_workers=num_workers)
    if num_workers == 1:
        assert_same_bits(results[0], snapshot(expected))
    assert_close(results[-1], snapshot(expected), reordering(torch.float32, 48, STEPS, 100.0))


def test_different_edits_of_tables_are_refused() -> None:
    messages: list[str] = []

    def program(kv: KVStore) -> None:
        torch.set_num_threads(1)
        model = Recommender(dense=False)
        trainer = echelon.Trainer(model, OPTIMIZERS["adagrad"](model.parameters()), kv)
        batch = batches(4)[0]
        with torch.no_grad():
            model.users.weight[3] = kv.rank
        loss_of(model, batch).backward()
        messages.append(usage_error(lambda: trainer.step(4)))

    with pytest.raises(UsageError, match="changed weights outside the optimizer"):  # the other server refuses it, too
        run(program, "dist_sync")
    assert len(messages) == 2
    assert all("workers 0, 1 changed weights outside the optimizer, but not to the" in text for text in messages)


def test_the_optimizer_saves_and_loads_states_of_tables() -> None:
    """`optimizer.state_dict()` has what plain PyTorch's has, and another run continues from it."""
    model, data = model_for("sparse adam"), batches(8)

    def train(model: nn.Module, optimizer: Optimizer, data: list[Batch]) -> None:
        for batch in data:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()

    def first(kv: KVStore) -> tuple[State, dict[str, Any]]:
        torch.set_num_threads(1)
        mine = copy.deepcopy(model)
        optimizer = OPTIMIZERS["sparse adam"](mine.parameters())
        with echelon.Trainer(mine, optimizer, kv):
            train(mine, optimizer, data[:3])
            return snapshot(mine), optimizer.state_dict()

    def second(kv: KVStore, weights: State, state: dict[str, Any]) -> State:
        torch.set_num_threads(1)
        mine = copy.deepcopy(model)
        optimizer = OPTIMIZERS["sparse adam"](mine.parameters())
        with echelon.Trainer(mine, optimizer, kv):
            mine.load_state_dict(weights)
            optimizer.load_state_dict(state)
            train(mine, optimizer, data[3:])
            return snapshot(mine)

    expected = copy.deepcopy(model)
    optimizer = OPTIMIZERS["sparse adam"](expected.parameters())
    train(expected, optimizer, data[:3])
    weights, state = on_one_worker(first, "dist_sync")
    for number, wanted in optimizer.state_dict()["state"].items():
        assert wanted.keys() == state["state"][number].keys()
        assert all(
            torch.equal(torch.as_tensor(v), torch.as_tensor(state["state"][number][k])) for k, v in wanted.items()
        )
    train(expected, optimizer, data[3:])
    assert_same_bits(on_one_worker(lambda kv: second(kv, weights, state), "dist_sync"), snapshot(expected))


def test_a_sparse_gradient_of_a_dense_key_is_made_dense(caplog: pytest.LogCaptureFixture) -> None:
    """The model does not show that `F.embedding` gives its weight a sparse gradient."""

    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.arange(12.0).view(6, 2))

        def forward(self, rows: Tensor) -> Tensor:
            return nn.functional.embedding(rows, self.table, sparse=True)

    def program(kv: KVStore) -> Tensor:
        model = Functional()
        with echelon.Trainer(model, SGD(model.parameters(), lr=1.0), kv) as trainer:
            for _ in range(2):
                model(torch.tensor([1, 1, 4])).sum().backward()
                trainer.step()
            return model.table.detach().clone()

    expected = torch.arange(12.0).view(6, 2) - torch.tensor([0, 4, 0, 0, 2, 0])[:, None]
    torch.testing.assert_close(on_one_worker(program, "dist_sync"), expected)
    assert sum("the gradient of 'table' is sparse" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda p: Adam(p), "'users.weight' has sparse gradients: adam does not support sparse gradients, please"),
        (lambda p: RMSprop(p), "servers update rows with SGD, Adagrad and SparseAdam, not with rmsprop"),
        (lambda p: SGD(p, lr=0.1, momentum=0.9), "SGD with momentum=0.9 would change all rows that had a gradient"),
        (lambda p: SGD(p, lr=0.1, weight_decay=0.1), "weight_decay option is not compatible with sparse gradients"),
        (lambda p: Adagrad(p, weight_decay=0.1), "weight_decay option is not compatible with sparse gradients"),
        (lambda p: SGD(p, lr=0.1, fused=True), "fused=True does not support sparse gradients"),
    ],
)
def test_an_optimizer_that_does_not_support_sparse_gradients(make: Callable[[Any], Optimizer], text: str) -> None:
    def program(kv: KVStore) -> str:
        model = Recommender()
        parameters = [model.items.weight, model.users.weight]  # the Trainer takes the last one first
        return usage_error(lambda: echelon.Trainer(model, make(parameters[1:]), kv))

    assert text in on_one_worker(program, "dist_sync")


def test_a_table_that_gets_a_dense_gradient() -> None:
    def program(kv: KVStore) -> str:
        model = Recommender()
        trainer = echelon.Trainer(model, SGD(model.parameters(), lr=0.1), kv)
        model.users.weight.sum().backward()
        return usage_error(lambda: trainer.step(1))

    assert "the gradient of 'users.weight' is dense, but" in on_one_worker(program, "dist_sync")


def test_max_norm_is_refused() -> None:
    def program(kv: KVStore) -> str:
        model = nn.Embedding(5, 3, sparse=True, max_norm=1.0)
        return usage_error(lambda: echelon.Trainer(model, SGD(model.parameters(), lr=0.1), kv))

    assert "has max_norm=1.0" in on_one_worker(program, "dist_sync")


def test_embeddings_of_other_classes_are_tables_too() -> None:
    """DLRM's QREmbeddingBag, for example, has two tables and calls `F.embedding_bag(sparse=True)`."""

    class SplitEmbedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sparse = True
            self.quotients = nn.Parameter(torch.ones(40, 3))
            self.remainders = nn.Parameter(torch.ones(7, 3))

        def forward(self, rows: Tensor) -> Tensor:
            quotients = nn.functional.embedding(rows // 7, self.quotients, sparse=True)
            return quotients * nn.functional.embedding(rows % 7, self.remainders, sparse=True)

    def program(kv: KVStore | None) -> State:
        torch.set_num_threads(1)
        model = SplitEmbedding()
        optimizer = Adagrad(model.parameters(), lr=0.1)
        trainer = echelon.Trainer(model, optimizer, kv) if kv is not None else None
        for step in range(3):
            optimizer.zero_grad()
            model(torch.tensor([step, 100, 100])).sum().backward()
            optimizer.step()
        if trainer is not None:
            assert isinstance(trainer.kvstore, ServerStore)
            assert all(slot.spec.row_sparse for slot in trainer.kvstore.slots(["quotients", "remainders"]))
            trainer.close()
        return snapshot(model)

    assert_same_bits(on_one_worker(program, "dist_sync"), program(None))
