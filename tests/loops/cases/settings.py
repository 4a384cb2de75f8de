"""Loops that change the learning rate and other settings."""

from __future__ import annotations

from torch.optim.lr_scheduler import OneCycleLR, StepLR

from loops.loop import Result, Run, loop
from loops.models import mlp, momentum, step


@loop("StepLR")
def step_lr(run: Run) -> Result:
    model = mlp()
    optimizer = momentum(model)
    net = run.attach(model, optimizer)
    schedule = StepLR(optimizer, 2, gamma=0.5)
    for loss in run.losses(net):
        step(loss, optimizer)
        schedule.step()
    return model


@loop("sets the learning rate between backward() and step() (Noam)")
def noam(run: Run) -> Result:
    model = mlp()
    optimizer = momentum(model)
    net = run.attach(model, optimizer)
    for number, loss in enumerate(run.losses(net), start=1):
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * min(number**-0.5, number * 4**-1.5)
        optimizer.step()
        optimizer.zero_grad()
    return model


@loop("OneCycleLR, which also changes the momentum")
def one_cycle(run: Run) -> Result:
    model = mlp()
    optimizer = momentum(model)
    net = run.attach(model, optimizer)
    schedule = OneCycleLR(optimizer, max_lr=0.1, total_steps=run.steps)
    for loss in run.losses(net):
        step(loss, optimizer)
        schedule.step()
    return model
