"""Workers that start with other values, and values that they share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from loops.kinds import FEATURES, TARGETS
from loops.loop import ALONE, Result, Run, loop
from loops.models import begin, mlp, momentum, step


@loop("another seed on each worker: all start with the weights of rank 0")
def other_seeds(run: Run) -> Result:
    torch.manual_seed(run.rank)
    model, optimizer, net = begin(run)
    for loss in run.losses(net):
        step(loss, optimizer)
    return model


class Scaled(nn.Module):
    """Has a buffer and a frozen parameter that are random."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()
        self.frozen = nn.Parameter(torch.randn(FEATURES), requires_grad=False)
        self.scale: Tensor
        self.register_buffer("scale", torch.rand(FEATURES))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs * self.scale + self.frozen)
        return outputs


@loop("another seed on each worker: frozen parameters and buffers, too")
def frozen_and_buffers(run: Run) -> Result:
    torch.manual_seed(run.rank)
    model, optimizer, net = begin(run, Scaled(), ddp={"broadcast_buffers": True})
    for loss in run.losses(net):
        step(loss, optimizer)
    return model


FLOAT32 = 1e6  # the magnification of errors of an average that is computed in float32, beside float64


@loop(
    "Trainer(average_buffers=True): BatchNorm's statistics are averaged",
    reference=ALONE,
    learns=False,
    magnification=FLOAT32,
)
def averages_buffers(run: Run) -> Result:
    """The mean of the batches' means is that of the joined batch."""
    model, optimizer, net = begin(
        run,
        nn.Sequential(nn.BatchNorm1d(FEATURES, affine=False), nn.Linear(FEATURES, TARGETS)),
        optimizer=lambda model: momentum(model, lr=0.0),
        average_buffers=True,
    )
    for loss in run.losses(net):
        step(loss, optimizer)
    if run.trainer is not None:
        run.trainer.average_buffers()
    return {name: value for name, value in model.state_dict().items() if name == "0.running_mean"}


@loop("trainer.all_reduce(): the mean loss of all workers")
def all_reduces(run: Run) -> Result:
    model, optimizer, net = begin(run)
    means = []
    for loss in run.losses(net):
        step(loss, optimizer)
        means.append(run.all_reduce(loss.detach()))
    return model, means


@loop("trainer.gather(): the rank of each worker, in order")
def gathers(run: Run) -> Result:
    model, optimizer, net = begin(run)
    for loss in run.losses(net):
        step(loss, optimizer)
    ranks = run.trainer.gather(run.rank) if run.trainer is not None else list(range(run.size))
    return model, ranks
