"""A plain loop under `dist_sync`, whose final weights depend on every update, in order. Prints their SHA-256.

Arguments: the name of an optimizer in `torch.optim`, and the number of steps.
"""

from __future__ import annotations

import hashlib
import sys
import time

import torch
from torch import nn

import echelon


def main() -> None:
    name, steps = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 300), nn.ReLU(), nn.Linear(300, 200), nn.ReLU(), nn.Linear(200, 10))
    settings = {"momentum": 0.9} if name == "SGD" else {}
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.005, **settings)
    trainer = echelon.Trainer(model, optimizer, "dist_sync")
    rank = trainer.kvstore.rank
    longest_s = 0.0
    for step in range(steps):
        generator = torch.Generator().manual_seed(step * 100 + rank)
        inputs = torch.randn(16, 200, generator=generator)
        labels = torch.randint(0, 10, (16,), generator=generator)
        began = time.monotonic()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        trainer.step(16)
        longest_s = max(longest_s, time.monotonic() - began)
    trainer.close()
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    print(f"worker {rank}: weights {hashlib.sha256(weights).hexdigest()}, longest step {longest_s:.3f} s", flush=True)


if __name__ == "__main__":
    main()
