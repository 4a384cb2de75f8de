"""Trains in lock-step until a file appears. The backward pass of worker 2 is slow, and nothing else is."""

import sys
import time
from pathlib import Path

import torch

import echelon

SLOW_RANK, SLOW_S = 2, 0.08
EVERY_S = 0.01  # of work that each worker does, so that the processes of a test leave the cores free


class SlowBackward(torch.autograd.Function):
    """The identity, whose gradient takes time."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> torch.Tensor:
        time.sleep(SLOW_S)
        return gradients[0]


torch.set_num_threads(1)
stop = Path(sys.argv[1])
kv = echelon.kvstore.create("dist_sync")
torch.manual_seed(7)
model = torch.nn.Linear(64, 10)
with echelon.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), kv) as trainer:
    while not stop.exists():
        time.sleep(EVERY_S)
        output = model(torch.randn(16, 64))
        if kv.rank == SLOW_RANK:
            output = SlowBackward.apply(output)  # type: ignore[no-untyped-call]
        output.square().mean().backward()
        trainer.step(16)
