"""Every optimizer that servers run: how to make it, and what a schedule changes in every step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from plain_loops import Net
from torch import nn, optim
from torch.optim import Optimizer

from echelon import optim as mxnet


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
