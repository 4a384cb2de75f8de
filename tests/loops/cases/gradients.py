"""Loops that read or change gradients."""

from __future__ import annotations

from torch.nn.utils import clip_grad_norm_

from loops.loop import Result, Run, loop, refused
from loops.models import mlp, momentum

MAX_NORM = 0.2


@loop("two backward passes per step: optimizer.step() after every second one")
def accumulates(run: Run) -> Result:
    model = mlp()
    optimizer = momentum(model)
    net = run.attach(model, optimizer)
    for number, loss in enumerate(run.losses(net)):
        (loss / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return model


@loop("clip_grad_norm_ before the step", sync=refused("max_grad_norm"))
def clips_norm(run: Run) -> Result:
    model = mlp()
    optimizer = momentum(model)
    net = run.attach(model, optimizer)
    for loss in run.losses(net):
        loss.backward()
        clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return model


@loop("clips with Trainer(max_grad_norm=…) in place of clip_grad_norm_")
def clips_in_trainer(run: Run) -> Result:
    model = mlp()
    optimizer = momentum(model)
    net = run.attach(model, optimizer, max_grad_norm=MAX_NORM)
    for loss in run.losses(net):
        loss.backward()
        if run.trainer is None:
            clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return model
