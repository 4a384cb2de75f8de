"""Optimizers: all of torch.optim, their variants, and a user's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn, optim
from torch.optim import SGD, Optimizer

import echelon.optim
from loops.loop import Result, Run, loop, refused
from loops.models import begin, step

Make = Callable[[nn.Module], Optimizer]


def of(kind: Callable[..., Optimizer], **settings: Any) -> Make:
    return lambda model: kind(model.parameters(), **settings)


OPTIMIZERS: dict[str, Make] = {
    "SGD": of(optim.SGD, lr=0.1),
    "SGD(nesterov=True, weight_decay=…)": of(optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD(maximize=True)": of(optim.SGD, lr=0.001, maximize=True),
    "SGD(foreach=True)": of(optim.SGD, lr=0.05, momentum=0.9, foreach=True),
    "SGD(fused=True)": of(optim.SGD, lr=0.05, momentum=0.9, fused=True),
    "Adam": of(optim.Adam, lr=0.01),
    "Adam(amsgrad=True)": of(optim.Adam, lr=0.01, amsgrad=True),
    "Adam(fused=True)": of(optim.Adam, lr=0.01, fused=True),
    "AdamW": of(optim.AdamW, lr=0.01, weight_decay=0.1),
    "RMSprop(centered=True, momentum=…)": of(optim.RMSprop, lr=0.001, centered=True, momentum=0.9),
    "Adagrad": of(optim.Adagrad, lr=0.05),
    "Adadelta": of(optim.Adadelta, lr=1.0),
    "Adamax": of(optim.Adamax, lr=0.01),
    "NAdam": of(optim.NAdam, lr=0.01),
    "RAdam": of(optim.RAdam, lr=0.01),
    "ASGD": of(optim.ASGD, lr=0.05),
    "Rprop": of(optim.Rprop, lr=0.001),
    "Adafactor": of(optim.Adafactor, lr=0.05),
    "echelon.optim.NAG (MXNet's)": of(echelon.optim.NAG, lr=0.05, momentum=0.9),
}
MAXIMIZE = {"SGD(maximize=True)"}
ROOTS = 100.0  # adaptive optimizers divide by the root of a small number, which magnifies rounding errors
SCALARS = 1e4  # torch keeps mu_product and eta in the default dtype, which in a server is float32
FLOAT32_SCALARS = {"NAdam", "ASGD"}


def trains(make: Make, run: Run) -> Result:
    model, optimizer, net = begin(run, optimizer=make)
    for loss in run.losses(net):
        step(loss, optimizer)
    return model, optimizer.state_dict()["state"]


for _name, _make in OPTIMIZERS.items():
    loop(
        _name,
        theme="optimizers",
        learns=_name not in MAXIMIZE,
        magnification=SCALARS if _name in FLOAT32_SCALARS else ROOTS,
    )(partial(trains, _make))


if hasattr(optim, "Muon"):

    @loop("Muon, for a model of matrices", magnification=ROOTS, exact_on_gpu=False)
    def muon(run: Run) -> Result:
        layers = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False))
        model, optimizer, net = begin(run, layers, optimizer=of(optim.Muon, lr=0.01))
        for loss in run.losses(net):
            step(loss, optimizer)
        return model


class SignSGD(Optimizer):
    """A user's own optimizer, in a module that servers can import."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad.sign(), alpha=-group["lr"])


@loop("a user's own optimizer class, with --allow-optimizer module:Class")
def own_class(run: Run) -> Result:
    model, optimizer, net = begin(run, optimizer=of(SignSGD, lr=0.01))
    for loss in run.losses(net):
        step(loss, optimizer)
    return model


class OtherSignSGD(SignSGD):
    """A class that the launcher does not allow."""


NOT_ALLOWED = refused("--allow-optimizer loops.cases.optimizers:OtherSignSGD")


@loop("a user's own optimizer class that was not allowed", one=NOT_ALLOWED, sync=NOT_ALLOWED, relaxed=NOT_ALLOWED)
def not_allowed(run: Run) -> Result:
    model, optimizer, net = begin(run, optimizer=of(OtherSignSGD, lr=0.01))
    for loss in run.losses(net):
        step(loss, optimizer)
    return model


LOCAL_CLASS = refused("defined inside a function: move it to a module")


@loop("an optimizer class that is defined inside a function", one=LOCAL_CLASS, sync=LOCAL_CLASS, relaxed=LOCAL_CLASS)
def local_class(run: Run) -> Result:
    class Plain(SGD):
        pass

    model, optimizer, net = begin(run, optimizer=of(Plain, lr=0.05))
    for loss in run.losses(net):
        step(loss, optimizer)
    return model


@loop(
    "an optimizer class that is defined inside a function, with Trainer(update_on_kvstore=False)",
    relaxed=refused("use dist_sync"),
)
def local_class_local_update(run: Run) -> Result:
    class Plain(SGD):
        pass

    model, optimizer, net = begin(run, optimizer=of(Plain, lr=0.05), update_on_kvstore=False)
    for loss in run.losses(net):
        step(loss, optimizer)
    return model


@loop("a learning rate that is a tensor: SGD(lr=torch.tensor(0.05))")
def tensor_rate(run: Run) -> Result:
    model, optimizer, net = begin(run, optimizer=of(optim.SGD, lr=torch.tensor(0.05)))
    for number, loss in enumerate(run.losses(net)):
        step(loss, optimizer)
        optimizer.param_groups[0]["lr"].fill_(0.05 / (1 + number))
    return model
