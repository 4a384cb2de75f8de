"""A worker whose one key is updated in several parts. Each push subtracts 1 from every element, exactly.

Argument: the number of pushes. Prints the values that occur in the weights, with their counts.
"""

from __future__ import annotations

import json
import sys

import torch

from echelon.kvstore import create
from plain_sgd import PLAIN_SGD

PART = 131_072  # elements that a server updates at a time
NUM_PARTS = 4


def main() -> None:
    kv = create("dist_sync")
    weights = torch.zeros(NUM_PARTS * PART)
    kv.init("weights", weights)
    kv.use_optimizer(PLAIN_SGD)
    kv.pull("weights", weights)
    for _ in range(int(sys.argv[1])):
        kv.pushpull("weights", torch.full_like(weights, 1 / kv.num_workers), weights)
    values, counts = weights.unique(return_counts=True)
    found = dict(zip(values.tolist(), counts.tolist(), strict=True))
    print(f"worker {kv.rank} has {json.dumps(found)}", flush=True)
    kv.close()


if __name__ == "__main__":
    main()
