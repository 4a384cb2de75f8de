"""A worker of Echelon: pushes and pulls one key per step and prints the number of the step."""

from __future__ import annotations

import sys
import time

import torch

import echelon

NUM_STEPS, STEP_S = int(sys.argv[1]), float(sys.argv[2])


def main() -> None:
    """Train a small model with the samples that the ledger hands out."""
    torch.set_num_threads(1)
    model = torch.nn.Linear(100, 200)  # large enough that every server stores a part
    store = echelon.kvstore.create("dist_sync")
    with echelon.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), store) as trainer:
        for step, indices in enumerate(trainer.samples(NUM_STEPS * store.num_workers * 8, 8)):
            time.sleep(STEP_S)
            model(torch.ones(len(indices), 100)).mean().backward()
            trainer.step(len(indices))
            print(f"worker {store.rank} step {step + 1}", flush=True)


if __name__ == "__main__":
    main()
