"""The training program of the jobs: a small network, and epochs that take a fraction of a second."""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

import echelon
from echelon import kvstore


def main() -> None:
    """Train until the ledger has no more samples."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kv-store", required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--samples", type=int, required=True, help="of one epoch")
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--step-s", type=float, required=True, help="how long a step computes at least")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    inputs, labels = torch.rand(options.samples, 32), torch.randint(0, 10, (options.samples,))
    network = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    with echelon.Trainer(network, optimizer, kvstore.create(options.kv_store)) as trainer:
        for indices in trainer.samples(options.samples, options.batch_size, epochs=options.epochs):
            began = time.monotonic()
            loss = nn.functional.cross_entropy(network(inputs[indices]), labels[indices])
            optimizer.zero_grad()
            loss.backward()
            time.sleep(max(0.0, options.step_s - (time.monotonic() - began)))
            trainer.step(len(indices))


if __name__ == "__main__":
    main()
