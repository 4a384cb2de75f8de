"""Loops that read weights outside of the forward pass."""

from __future__ import annotations

from loops.loop import Result, Run, loop
from loops.models import mlp, momentum, step


@loop("averages the weights after each step (EMA by hand)", reads_weights=True)
def ema_by_hand(run: Run) -> Result:
    model = mlp()
    optimizer = momentum(model)
    net = run.attach(model, optimizer)
    average = [p.detach().clone() for p in model.parameters()]
    for loss in run.losses(net):
        step(loss, optimizer)
        for mean, p in zip(average, model.parameters(), strict=True):
            mean.mul_(0.9).add_(p.detach(), alpha=0.1)
    return model, average
