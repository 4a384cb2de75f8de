"""The worker of `echelon bench load`: trains a small network on random digits until its time is up.

The last line of its output is JSON: its rank, its steps, and the seconds that they took.
"""

import json
import sys
import time

import torch
from torch import nn

import echelon
from echelon import kvstore

BATCH_SIZE = 16


def main() -> None:
    """Train for `seconds`, the second argument; the first one is the store."""
    store, seconds, width = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    kv = kvstore.create(store)
    data = torch.Generator().manual_seed(kv.rank)
    images, labels = torch.randn(1024, 64, generator=data), torch.randint(10, (1024,), generator=data)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    steps = 0
    with echelon.Trainer(model, optimizer, kv) as trainer:
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            first = steps * BATCH_SIZE % len(images)
            nn.functional.cross_entropy(
                model(images[first : first + BATCH_SIZE]), labels[first : first + BATCH_SIZE]
            ).backward()
            trainer.step(BATCH_SIZE)
            steps += 1
        took = time.monotonic() - began
    print(json.dumps({"rank": kv.rank, "steps": steps, "seconds": round(took, 3)}), flush=True)


if __name__ == "__main__":
    main()
