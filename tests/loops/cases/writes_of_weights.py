"""Loops that change weights themselves."""

from __future__ import annotations

import torch

from loops.loop import Result, Run, loop, refused
from loops.models import mlp, momentum, step

EDIT = refused("trainer.edit_weights()")


@loop("clamps the weights after each step (WGAN)", reads_weights=True, relaxed=EDIT)
def clamps(run: Run) -> Result:
    model = mlp()
    optimizer = momentum(model)
    net = run.attach(model, optimizer)
    for loss in run.losses(net):
        step(loss, optimizer)
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.3, 0.3)
    return model


@loop("clamps the weights in `with trainer.edit_weights():`", reads_weights=True)
def clamps_in_block(run: Run) -> Result:
    model = mlp()
    optimizer = momentum(model)
    net = run.attach(model, optimizer)
    for loss in run.losses(net):
        step(loss, optimizer)
        with run.edit_weights():
            for p in model.parameters():
                p.data.clamp_(-0.3, 0.3)
    return model
