"""A loop that exchanges a value between backward and step, with gradients that are clipped and sent early.

Arguments: "exchange" or "plain", and the rank that kills itself between backward and the exchange, or "nobody".
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys

import torch
from torch import nn

import echelon


def main() -> None:
    exchanges, dies = sys.argv[1] == "exchange", sys.argv[2]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 300), nn.ReLU(), nn.Linear(300, 200), nn.ReLU(), nn.Linear(200, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = echelon.Trainer(model, optimizer, "dist_sync", max_grad_norm=1.0)
    rank = trainer.kvstore.rank
    for step, index in enumerate(trainer.samples(160, 4)):
        inputs = torch.randn(len(index), 200, generator=torch.Generator().manual_seed(int(index[0])))
        nn.functional.cross_entropy(model(inputs), index % 10).backward()
        if step == 10 and dies == str(rank):
            os.kill(os.getpid(), signal.SIGKILL)
        if exchanges:
            mean = trainer.all_reduce(torch.tensor([float(rank)]))
            assert dies != "nobody" or mean.item() == (trainer.kvstore.num_workers - 1) / 2
        trainer.step(len(index))
    trainer.close()
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    print(f"worker {rank}: weights {hashlib.sha256(weights).hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
