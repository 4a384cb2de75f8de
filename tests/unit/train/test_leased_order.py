"""The ledger of a loop says what its order depends on, so that the scheduler can compare the workers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import echelon


@pytest.mark.parametrize(
    ("arguments", "order"), [({"seed": 3}, "seed 3, shuffled"), ({"seed": 3, "shuffle": False}, "not shuffled")]
)
def test_samples_and_a_sampler_describe_their_order(arguments: dict[str, Any], order: str) -> None:
    model = nn.Linear(1, 1)
    trainer = echelon.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01))
    indices = trainer.samples(8, 4, **arguments)
    assert trainer._leased is not None
    assert trainer._leased.leases.opened.order == order
    for _ in indices:
        pass
    sampler = echelon.LeaseSampler(trainer, 8, 4, **arguments)
    assert sampler._leased.leases.opened.order == order
    trainer.close()
