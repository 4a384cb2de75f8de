"""Every optimizer that servers run, what a schedule changes in every step, and loops with and without a Trainer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from plain_loops import Batch, Net, State, assert_same_bits, loss_of, snapshot
from torch import nn, optim
from torch.optim import Optimizer

import echelon
from echelon import optim as mxnet
from echelon.kvstore import KVStore
from echelon.launch.threads.in_process import run


@dataclass(frozen=True)
class Case:
    """An optimizer class, its settings, and its changes at step number n. Its learning rate falls in every step."""

    kind: type[Optimizer]
    settings: dict[str, Any] = field(default_factory=dict)
    change: Callable[[int], dict[str, Any]] = lambda n: {}
    model: Callable[[], nn.Module] = Net

    def make(self, model: nn.Module) -> Optimizer:
        """Return the optimizer with two parameter groups, which alternate in the model."""
        parameters = list(model.parameters())
        groups: list[dict[str, Any]] = [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.02}]
        return self.kind(groups, **{"lr": 0.01, **self.settings})

    def set(self, optimizer: Optimizer, number: int) -> None:
        """Change the settings for a step, as a schedule would."""
        for group in optimizer.param_groups:
            group.update({"lr": group["lr"] * 0.9, **self.change(number)})


class Matrices(nn.Module):
    """Has no parameter but matrices, as Muon requires."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 300, bias=False)
        self.last = nn.Linear(300, 5, bias=False)

    def forward(self, images: Any) -> Any:
        return self.last(self.first(images.flatten(1)).tanh())


CASES: dict[str, Case] = {
    "SGD": Case(optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}, lambda n: {"momentum": 0.9 - n / 10}),
    "SGD-nesterov": Case(optim.SGD, {"momentum": 0.9, "nesterov": True}, lambda n: {"weight_decay": n / 10}),
    "Adam": Case(optim.Adam, {"amsgrad": True}, lambda n: {"betas": (0.9 - n / 50, 0.99)}),
    "Adam-decoupled": Case(optim.Adam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    "AdamW": Case(optim.AdamW, {"weight_decay": 0.1}, lambda n: {"betas": (0.9, 0.99 - n / 50)}),
    "Adagrad": Case(optim.Adagrad, {"initial_accumulator_value": 0.1}, lambda n: {"lr_decay": n / 10}),
    "RMSprop": Case(optim.RMSprop, {"momentum": 0.9, "centered": True}, lambda n: {"alpha": 0.99 - n / 50}),
    "Adadelta": Case(optim.Adadelta, {"weight_decay": 0.01}, lambda n: {"rho": 0.9 - n / 50}),
    "Adamax": Case(optim.Adamax, {"weight_decay": 0.01}, lambda n: {"betas": (0.9 - n / 50, 0.99)}),
    "NAdam": Case(optim.NAdam, {"momentum_decay": 0.1}, lambda n: {"betas": (0.9 - n / 50, 0.99)}),
    "NAdam-decoupled": Case(optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "RAdam": Case(optim.RAdam, {"betas": (0.9, 0.9)}, lambda n: {"weight_decay": n / 50}),
    "ASGD": Case(optim.ASGD, {"t0": 2, "lambd": 0.1}, lambda n: {"weight_decay": n / 50}),
    "Rprop": Case(optim.Rprop, {}, lambda n: {"etas": (0.5 - n / 50, 1.2)}),
    "Adafactor": Case(optim.Adafactor, {"weight_decay": 0.1}, lambda n: {"beta2_decay": n / 50 - 0.8}),
    "LARS": Case(mxnet.LARS, {"momentum": 0.9, "weight_decay": 0.1}, lambda n: {"eta": 0.1 + n / 10}),
    "LAMB": Case(mxnet.LAMB, {"weight_decay": 0.1}, lambda n: {"betas": (0.9 - n / 50, 0.99)}),
    "GroupAdaGrad": Case(mxnet.GroupAdaGrad, model=Matrices),
}
if hasattr(optim, "Muon"):  # since torch 2.9
    CASES["Muon"] = Case(optim.Muon, {}, lambda n: {"momentum": 0.95 - n / 50}, model=Matrices)


def plain(case: Case, model: nn.Module, data: list[Batch]) -> State:
    """Train with plain PyTorch and return the last weights."""
    own = copy.deepcopy(model)
    optimizer = case.make(own)
    for number, batch in enumerate(data):
        case.set(optimizer, number)
        loss_of(own, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(own)


def steps(case: Case, trainer: echelon.Trainer, data: list[Batch], first: int = 0) -> None:
    """Make one step per batch with a Trainer."""
    for number, batch in enumerate(data, first):
        case.set(trainer.optimizer, number)
        loss_of(trainer.model, batch).backward()
        trainer.step(len(batch[0]))


def trained(case: Case, model: nn.Module, parts: list[list[Batch]], store: str = "dist_sync", **job: Any) -> State:
    """Train with a Trainer on every worker and return the last weights, which all workers have."""

    def program(kv: KVStore) -> State:
        torch.set_num_threads(1)
        own = copy.deepcopy(model)
        with echelon.Trainer(own, case.make(own), kv) as trainer:
            steps(case, trainer, parts[kv.rank])
            trainer.sync()
            kv.barrier()
            trainer.refresh()
            return snapshot(own)

    states = run(program, store, num_workers=len(parts), **job)
    for state in states[1:]:
        assert_same_bits(state, states[0])
    return states[0]
