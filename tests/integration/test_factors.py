"""Pushing factors instead of gradients only changes what is sent: the weights are the same bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain_loops import STORES, Batch, State, assert_close, assert_same_bits, differs, on_one_worker, seeded, snapshot
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import echelon
import tolerances
from echelon.errors import UsageError
from echelon.kvstore import KVStore
from echelon.launch.threads.in_process import run
from echelon.transport.choose import by_name

pytestmark = pytest.mark.numeric

SAMPLES, INPUTS, WIDTH = 6, 1100, 1024  # 4.5 MB of weights, which are a bucket by themselves
MakeOptimizer = Callable[[nn.Module], Optimizer]
Step = Callable[[nn.Module, echelon.Trainer | None, Batch], None]


class Wide(nn.Module):
    """Has a large layer and then a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Linear(INPUTS, WIDTH)
        self.small = nn.Linear(WIDTH, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.small(torch.relu(self.large(inputs)))
        return logits


def batches(count: int, seed: int = 1, size: int = SAMPLES) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, INPUTS, generator=generator), torch.randint(0, 5, (size,), generator=generator))
        for _ in range(count)
    ]


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def adam(model: nn.Module) -> Optimizer:
    return Adam(model.parameters(), lr=0.001)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def backward(model: nn.Module, trainer: echelon.Trainer | None, batch: Batch) -> None:
    loss_of(model, batch).backward()


def trained(
    kv: KVStore, model: nn.Module, make: MakeOptimizer, data: list[Batch], step: Step = backward, factors: bool = True
) -> tuple[State, list[bool]]:
    """Return the weights, and for each step whether factors were pushed instead of the large layer's gradient."""
    torch.set_num_threads(1)
    mine = copy.deepcopy(model)
    factored = []
    with echelon.Trainer(mine, make(mine), kv, push_factors=factors) as trainer:
        for batch in data:
            step(mine, trainer, batch)
            factored.append(mine.get_parameter("large.weight").grad is None)
            trainer.step()
        return snapshot(mine), factored


def plain(model: nn.Module, make: MakeOptimizer, data: list[Batch], step: Step = backward) -> State:
    mine = copy.deepcopy(model)
    optimizer = make(mine)
    for batch in data:
        step(mine, None, batch)
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(mine)


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("store", [name for name in STORES if name.startswith("dist")])
def test_one_worker_is_plain_pytorch_bit_for_bit(store: str, make: MakeOptimizer) -> None:
    model, data = seeded(Wide), batches(4)
    found, factored = on_one_worker(lambda kv: trained(kv, model, make, data), store)
    assert factored == [True] * 4
    expected = plain(model, make, data)
    assert differs(expected, snapshot(model))
    assert_same_bits(found, expected)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_several_workers_get_the_same_bits_as_with_gradients(transport: str) -> None:
    """One of them has too many samples in its second batch, so the servers add factors to a gradient."""
    model = seeded(Wide)
    data = [batches(3, seed=rank) for rank in (0, 1)]
    data[1][1] = batches(1, seed=5, size=200)[0]

    def both(factors: bool) -> list[tuple[State, list[bool]]]:
        return run(
            lambda kv: trained(kv, model, sgd, data[kv.rank], factors=factors),
            "dist_sync",
            transport=by_name(transport),
        )

    with_factors, without = both(True), both(False)
    assert [factored for _, factored in with_factors] == [[True] * 3, [True, False, True]]
    assert [factored for _, factored in without] == [[False] * 3] * 2
    for one in with_factors:
        assert_same_bits(one[0], without[0][0])


def test_gradients_are_pushed_if_fewer_servers_than_workers_share_memory() -> None:
    model = seeded(Wide)
    found = run(lambda kv: trained(kv, model, sgd, batches(1))[1], "dist_sync", num_workers=2, num_servers=1)
    assert found == [[False], [False]]


# --- the loops people write


def twice(model: nn.Module, trainer: echelon.Trainer | None, batch: Batch) -> None:
    """Use the layer twice in one pass."""
    large, small = model.get_submodule("large"), model.get_submodule("small")
    if trainer is not None:
        model(batch[0])  # without a backward pass, so it must not count
    logits = small(torch.relu(large(batch[0])) + torch.tanh(large(2 * batch[0])))
    nn.functional.cross_entropy(logits, batch[1]).backward()


def in_parts(model: nn.Module, trainer: echelon.Trainer | None, batch: Batch) -> None:
    """Run a forward pass before `accumulate`, and the last part after it."""
    parts = [(batch[0][at : at + 2], batch[1][at : at + 2]) for at in (0, 2, 4)]
    first = loss_of(model, parts[0])
    if trainer is None:
        first.backward()
        loss_of(model, parts[1]).backward()
    else:
        with trainer.accumulate():
            first.backward()
            loss_of(model, parts[1]).backward()
    loss_of(model, parts[2]).backward()


def towards_the_inputs(model: nn.Module, trainer: echelon.Trainer | None, batch: Batch) -> None:
    """Change the inputs by the sign of their gradient, as adversarial training does; then make the step."""
    inputs = batch[0].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(model, (inputs, batch[1])), inputs)
    loss_of(model, (batch[0] + 0.01 * gradient.sign(), batch[1])).backward()


def from_a_copy(model: nn.Module, trainer: echelon.Trainer | None, batch: Batch) -> None:
    """Run a copy of the model, which has its own weights and sends nothing in its backward pass; then the step."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_parameter("large.weight").mul_(2)
    logits = other(batch[0])
    assert not torch.equal(logits, model(batch[0]))
    nn.functional.cross_entropy(logits, batch[1]).backward()
    assert other.get_parameter("large.weight").grad is not None
    loss_of(model, batch).backward()


@pytest.mark.parametrize(
    ("step", "pushed"), [(twice, True), (in_parts, False), (towards_the_inputs, True), (from_a_copy, True)]
)
def test_unusual_steps_give_the_bits_of_plain_pytorch(step: Step, pushed: bool) -> None:
    model, data = seeded(Wide), batches(2)
    found, factored = on_one_worker(lambda kv: trained(kv, model, sgd, data, step), "dist_sync")
    assert factored == [pushed] * 2
    if step is not twice:
        assert_same_bits(found, plain(model, sgd, data, step))
        return
    # One product of all rows is rounded differently than a sum of two products.
    expected = plain(model, sgd, data, step)
    assert_close(found, expected, tolerances.of_training(data))


@pytest.mark.parametrize("frozen", ["large.weight", "large.bias"])
def test_parameters_frozen_during_training_do_not_change(frozen: str) -> None:
    def step(model: nn.Module, trainer: echelon.Trainer | None, batch: Batch) -> None:
        model.get_parameter(frozen).requires_grad_(bool(batch[1][0] >= 0))
        loss_of(model, (batch[0], batch[1].abs())).backward()

    model, data = seeded(Wide), batches(3)
    data[1][1][0] = -1  # tells `step` to freeze
    found, factored = on_one_worker(lambda kv: trained(kv, model, sgd, data, step), "dist_sync")
    assert factored == [True, True, True]
    assert_same_bits(found, plain(model, sgd, data, step))


def test_gradients_are_pushed_under_autocast() -> None:
    def step(model: nn.Module, trainer: echelon.Trainer | None, batch: Batch) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, batch)
        loss.backward()

    model, data = seeded(Wide), batches(2)
    found, factored = on_one_worker(lambda kv: trained(kv, model, sgd, data, step), "dist_sync")
    assert factored == [False, False]
    assert_same_bits(found, plain(model, sgd, data, step))


class Shared(Wide):
    """Two modules share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(INPUTS, WIDTH)
        self.other.weight = self.large.weight

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.small(torch.relu(self.large(inputs) + self.other(inputs)))
        return logits


def test_the_gradient_of_a_weight_of_two_modules_is_pushed() -> None:
    model, data = seeded(Shared), batches(2)
    found, factored = on_one_worker(lambda kv: trained(kv, model, sgd, data), "dist_sync")
    assert factored == [False, False]
    assert_same_bits(found, plain(model, sgd, data))


# --- errors


def second_derivative(model: nn.Module, trainer: echelon.Trainer | None, batch: Batch) -> None:
    inputs = batch[0].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(model, (inputs, batch[1])), inputs, create_graph=True)
    gradient.square().sum().backward()


def clipped(model: nn.Module, trainer: echelon.Trainer | None, batch: Batch) -> None:
    """Clip the gradients. A parameter is unused, so only the factors of the large layer were sent before."""
    loss_of(model, batch).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    if trainer is not None:
        trainer.step()


class WithUnused(Wide):
    """Has a head that the loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 2)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (second_derivative, "a second derivative needs the weights' gradients; use push_factors=False"),
        (clipped, r"would change the gradient of .*, which was sent during backward.*overlap=False"),
    ],
)
def test_steps_that_factors_do_not_support_are_errors(step: Step, said: str) -> None:
    def program(kv: KVStore) -> None:
        model: Any = copy.deepcopy(wide)
        trainer = echelon.Trainer(model, sgd(model), kv, push_factors=True)
        with pytest.raises(UsageError, match=said):
            step(model, trainer, batches(1)[0])
        trainer.remove_hooks()

    wide = seeded(WithUnused)
    on_one_worker(program, "dist_sync")


def test_check_finite_checks_the_product_of_finite_factors() -> None:
    def program(kv: KVStore) -> None:
        model = copy.deepcopy(wide)
        trainer = echelon.Trainer(model, sgd(model), kv, push_factors=True, check_finite=True)
        with pytest.raises(UsageError, match=r"the gradient of 'large.weight' at clock 0 contains NaN or infinity"):
            (
                model.get_submodule("large")(torch.full((2, INPUTS), 1e30)).sum() * 1e30 + 0 * loss_of(model, data)
            ).backward()
        trainer.remove_hooks()

    wide, data = seeded(Wide), batches(1)[0]
    on_one_worker(program, "dist_sync")
