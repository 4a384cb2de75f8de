"""Loops that change the learning rate and other settings. A step uses them as they are at `step()`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.nn.functional import mse_loss
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiplicativeLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from loops.loop import Result, Run, loop
from loops.models import begin, step

SCHEDULES: dict[str, Callable[[Optimizer, int], Any]] = {
    "StepLR": lambda optimizer, steps: StepLR(optimizer, 2, gamma=0.5),
    "MultiStepLR": lambda optimizer, steps: MultiStepLR(optimizer, [1, 4], gamma=0.5),
    "ConstantLR": lambda optimizer, steps: ConstantLR(optimizer, 0.5, total_iters=3),
    "LinearLR (warm-up)": lambda optimizer, steps: LinearLR(optimizer, 0.2, total_iters=4),
    "ExponentialLR": lambda optimizer, steps: ExponentialLR(optimizer, 0.9),
    "PolynomialLR": lambda optimizer, steps: PolynomialLR(optimizer, steps, power=0.9),
    "LambdaLR": lambda optimizer, steps: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda optimizer, steps: MultiplicativeLR(optimizer, lambda step: 0.9),
    "CosineAnnealingLR": lambda optimizer, steps: CosineAnnealingLR(optimizer, steps, eta_min=0.001),
    "CosineAnnealingWarmRestarts": lambda optimizer, steps: CosineAnnealingWarmRestarts(optimizer, 2, 2),
    "CyclicLR, which also changes the momentum": lambda optimizer, steps: CyclicLR(
        optimizer, 0.01, 0.1, step_size_up=2
    ),
    "OneCycleLR, which also changes the momentum": lambda optimizer, steps: OneCycleLR(
        optimizer, 0.1, total_steps=steps
    ),
    "SequentialLR: a warm-up, then cosine": lambda optimizer, steps: SequentialLR(
        optimizer, [LinearLR(optimizer, 0.2, total_iters=2), CosineAnnealingLR(optimizer, steps)], [2]
    ),
    "ChainedScheduler": lambda optimizer, steps: ChainedScheduler(
        [ConstantLR(optimizer, 0.5, total_iters=2), ExponentialLR(optimizer, 0.9)]
    ),
}


def follows(schedule: Callable[[Optimizer, int], Any], run: Run) -> Result:
    model, optimizer, net = begin(run)
    made = schedule(optimizer, run.steps)
    for loss in run.losses(net):
        step(loss, optimizer)
        made.step()
    return model, optimizer.param_groups[0]["lr"]


for _name, _schedule in SCHEDULES.items():
    loop(_name, theme="settings")(partial(follows, _schedule))


@loop("ReduceLROnPlateau with the mean loss of all workers")
def plateau(run: Run) -> Result:
    model, optimizer, net = begin(run)
    schedule = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
    for loss in run.losses(net):
        step(loss, optimizer)
        schedule.step(float(run.all_reduce(loss.detach())))
    return model, optimizer.param_groups[0]["lr"]


@loop("sets the learning rate between backward() and step() (Noam)")
def noam(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for number, loss in enumerate(run.losses(net), start=1):
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * min(number**-0.5, number * 4**-1.5)
        optimizer.step()
        optimizer.zero_grad()
    return model


@loop("sets the learning rate before the forward pass (nanoGPT)")
def rate_before_forward(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for number, (inputs, targets) in enumerate(run.batches()):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * min(1.0, (number + 1) / 4)
        loss = mse_loss(net(inputs), targets)
        run.record(loss)
        step(loss, optimizer)
    return model


@loop("the momentum rises during training")
def momentum_rises(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for number, loss in enumerate(run.losses(net)):
        optimizer.param_groups[0]["momentum"] = min(0.9, 0.1 * number)
        step(loss, optimizer)
    return model


@loop("the weight decay follows a schedule (DINO)")
def decay_rises(run: Run) -> Result:
    model, optimizer, net = begin(run, optimizer=lambda model: Adam(model.parameters(), lr=0.01))
    for number, loss in enumerate(run.losses(net)):
        loss.backward()
        optimizer.param_groups[0]["weight_decay"] = 0.01 * (number + 1)
        optimizer.step()
        optimizer.zero_grad()
    return model


@loop("Adam's betas change in the middle of training")
def betas_change(run: Run) -> Result:
    model, optimizer, net = begin(run, optimizer=lambda model: Adam(model.parameters(), lr=0.01))
    for number, loss in enumerate(run.losses(net)):
        if number == 3:
            optimizer.param_groups[0]["betas"] = (0.5, 0.9)
        step(loss, optimizer)
    return model


@loop("a learning rate of 0 for some steps")
def rate_of_zero(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for number, loss in enumerate(run.losses(net)):
        optimizer.param_groups[0]["lr"] = 0.0 if number in (1, 2) else 0.05
        step(loss, optimizer)
    return model
