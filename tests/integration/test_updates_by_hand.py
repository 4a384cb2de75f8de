"""Loops that update weights by hand, without an optimizer, as PyTorch's word language model does."""

from __future__ import annotations

import copy

import pytest
import torch
from plain_loops import Net, State, assert_same_bits, batches, loss_of, momentum, on_one_worker, seeded, snapshot
from torch import nn

import echelon
from echelon.errors import UsageError
from echelon.kvstore import KVStore
from echelon.launch.threads.in_process import run

pytestmark = pytest.mark.numeric

START = seeded(Net)


def descend_by_hand(model: nn.Module) -> None:
    """Make a step without an optimizer."""
    torch.set_num_threads(1)  # otherwise a new thread's first convolution uses all cores and sums in another order
    model.zero_grad()
    loss_of(model, batches(1)[0]).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data.add_(parameter.grad, alpha=-0.1)


def test_one_worker_may_update_by_hand() -> None:
    def program(kv: KVStore) -> State:
        model = copy.deepcopy(START)
        with echelon.Trainer(model, momentum(model), kv):
            descend_by_hand(model)
        return snapshot(model)

    expected = copy.deepcopy(START)
    descend_by_hand(expected)
    assert_same_bits(on_one_worker(program, "dist_sync"), snapshot(expected))


@pytest.mark.parametrize("store", ["dist_sync", "dist_async"])
def test_several_workers_that_update_by_hand_are_told(store: str) -> None:
    def program(kv: KVStore) -> str:
        model = copy.deepcopy(START)
        trainer = echelon.Trainer(model, momentum(model), kv)
        descend_by_hand(model)
        with pytest.raises(UsageError, match="workers did not train together") as refused:
            trainer.close()
        return str(refused.value)

    for message in run(program, store, num_workers=2):
        assert ("update_on_kvstore=False" in message) == (store == "dist_sync")


def test_update_on_kvstore_false_averages_for_updates_by_hand() -> None:
    def program(kv: KVStore) -> State:
        model = copy.deepcopy(START)
        with echelon.Trainer(model, momentum(model), kv, update_on_kvstore=False):
            for _ in range(2):
                descend_by_hand(model)
        return snapshot(model)

    expected = copy.deepcopy(START)
    for _ in range(2):
        descend_by_hand(expected)
    for found in run(program, "dist_sync", num_workers=2):  # the mean of two equal gradients is the gradient
        assert_same_bits(found, snapshot(expected))
