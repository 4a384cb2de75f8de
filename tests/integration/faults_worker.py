"""A worker that prints the number of page faults per step: the median of nine steps, after a few others.

The median, because the heap sometimes grows by a block. If the allocator returns memory, every step has page faults.
"""

from __future__ import annotations

import itertools
import json
import resource

import torch

from echelon import Trainer, kvstore

BATCH = 256


def main() -> None:
    """Train with weights, gradients and activations of about 64 MB each, which is more than malloc keeps by default."""
    store = kvstore.create("dist_sync")
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(256, 65536), torch.nn.ReLU(), torch.nn.Linear(65536, 1))
    images = torch.rand(BATCH, 256)
    with Trainer(model, torch.optim.SGD(model.parameters(), lr=1e-6), store) as trainer:
        counts = []
        for _ in range(12):
            model(images).mean().backward()
            trainer.step()
            trainer.sync()
            counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    steps = sorted(after - before for before, after in itertools.pairwise(counts[2:]))
    print(json.dumps({"faults": steps[len(steps) // 2], "page_bytes": resource.getpagesize()}), flush=True)


if __name__ == "__main__":
    main()
