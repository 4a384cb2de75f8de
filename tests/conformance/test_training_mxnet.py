"""A whole training under a live MXNet 1.9.1, and the same one here, by one process and by workers with servers.

Needs MXNet's Python: .peers/mxnet, or the one that ECHELON_MXNET_PYTHON names.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import echelon
from echelon.kvstore import KVStore
from echelon.kvstore import create as create_store
from echelon.launch.threads.in_process import run as run_with_servers
from echelon.train.recipe.optimizers import make_optimizer
from echelon.train.recipe.plan import LargeBatch
from echelon.train.recipe.schedules import make_schedule
from echelon.train.step.captured import set_learning_rate
from mxnet_peer import run_mxnet

pytestmark = pytest.mark.peer

BATCHES, BATCH, WIDTH, HIDDEN = 12, 8, 6, 5
STEPS = (4, 9)  # updates after which the rate drops
NAMES = {"0.weight": "fc1_weight", "0.bias": "fc1_bias", "2.weight": "fc2_weight", "2.bias": "fc2_bias"}
CASES: dict[str, dict[str, Any]] = {  # MXNet's settings besides learning rate and weight decay
    "sgd": {"momentum": 0.9},
    "nag": {"momentum": 0.9},
    "adam": {},
    "rmsprop": {},
    "adagrad": {},
    "adadelta": {},
    "lbsgd": {"momentum": 0.9, "batch_scale": 3, "updates_per_epoch": BATCHES, "warmup_epochs": 0.5},
}
RATE, DECAY = 0.05, 0.02


def network() -> nn.Sequential:
    """Return a network with fixed first weights. Call it before threads start: they share torch's generator."""
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 3))


def data() -> tuple[Tensor, Tensor]:
    """Return the batches. The first two are equal, because MXNet's lbsgd overwrites the first gradient of its sum."""
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(BATCHES, BATCH, WIDTH, generator=generator)
    labels = torch.randint(3, (BATCHES, BATCH), generator=generator)
    images[0], labels[0] = images[1], labels[1]
    return images, labels


def mxnet() -> dict[str, dict[str, Tensor]]:
    images, labels = (tensor.tolist() for tensor in data())
    weights = {NAMES[name]: value.tolist() for name, value in network().state_dict().items()}
    requests = [
        {
            "optimizer": name,
            "settings": settings | {"learning_rate": RATE, "wd": DECAY},
            "steps": STEPS,
            "weights": weights,
            "images": images,
            "labels": labels,
        }
        for name, settings in CASES.items()
    ]
    answers = run_mxnet("training_mxnet_side.py", requests)
    return {
        case: {name: torch.tensor(answer[theirs]) for name, theirs in NAMES.items()}
        for case, answer in zip(CASES, answers, strict=True)
    }


def train(kv: KVStore, first: nn.Module, name: str, num_workers: int) -> dict[str, Tensor]:
    """Train on this worker's part of every batch, with the flags' schedule, as `echelon.train` does."""
    torch.set_num_threads(1)
    settings = CASES[name]
    large = {key: settings[key] for key in ("batch_scale", "updates_per_epoch", "warmup_epochs") if key in settings}
    model = copy.deepcopy(first)
    optimizer = make_optimizer(name, model, lr=RATE, weight_decay=DECAY, style="mxnet", large_batch=LargeBatch(**large))
    schedule = make_schedule(
        lr=RATE, factor=0.1, step_epochs=",".join(map(str, STEPS)), epoch_size=1, num_epochs=BATCHES
    )
    part = slice(kv.rank * BATCH // num_workers, (kv.rank + 1) * BATCH // num_workers)
    with echelon.Trainer(model, optimizer, kv) as trainer:
        for update, (images, labels) in enumerate(zip(*data(), strict=True), 1):
            set_learning_rate(optimizer, schedule.rate(update))
            cross_entropy(model(images[part]), labels[part]).backward()
            trainer.step(len(images[part]))
        return {key: value.clone() for key, value in model.state_dict().items()}


def test_a_training_gives_mxnets_weights() -> None:
    """Weights and biases, with a rate that drops twice and decay of the weights only."""
    first = network()
    before = dict(first.named_parameters())
    for case, theirs in mxnet().items():
        alone = train(create_store("local"), first, case, 1)
        program = partial(train, first=first, name=case, num_workers=2)
        together = run_with_servers(program, "dist_sync", num_workers=2, num_servers=2)
        for name, wanted in theirs.items():
            assert (wanted - before[name].detach()).abs().max() > 1e-3, f"{case} does not train {name}"
            for found in (alone, *together):
                assert torch.allclose(found[name], wanted, rtol=1e-4, atol=1e-5), (
                    f"{case}, {name}: {found[name] - wanted}"
                )
