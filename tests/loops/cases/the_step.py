"""How a loop ends a step."""

from __future__ import annotations

from loops.loop import Result, Run, loop
from loops.models import mlp, momentum


@loop("calls optimizer.step()")
def optimizer_step(run: Run) -> Result:
    model = mlp()
    optimizer = momentum(model)
    net = run.attach(model, optimizer)
    for loss in run.losses(net):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@loop("calls trainer.step(batch_size)")
def trainer_step(run: Run) -> Result:
    model = mlp()
    optimizer = momentum(model)
    net = run.attach(model, optimizer)
    for loss in run.losses(net):
        loss.backward()
        if run.trainer is not None:
            run.trainer.step(8)
        else:
            optimizer.step()
            optimizer.zero_grad()
    return model
