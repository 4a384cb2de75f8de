"""A worker of PyTorch DDP over gloo. As PyTorch's tutorial of torchrun does, rank 0 saves a snapshot every few steps,
and a restarted job continues from it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel

NUM_STEPS, STEP_S, SAVE_EVERY, SNAPSHOT = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])


def main() -> None:
    """Train from the snapshot, if there is one."""
    init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    model = nn.Linear(100, 10)
    first = 0
    if SNAPSHOT.exists():
        saved = torch.load(SNAPSHOT)
        model.load_state_dict(saved["model"])
        first = saved["step"]
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
    for step in range(first, NUM_STEPS):
        time.sleep(STEP_S)
        optimizer.zero_grad()
        parallel(torch.ones(8, 100)).mean().backward()
        optimizer.step()
        print(f"worker {rank} step {step + 1}", flush=True)
        if rank == 0 and (step + 1) % SAVE_EVERY == 0:
            temporary = SNAPSHOT.with_suffix(".new")
            torch.save({"model": model.state_dict(), "step": step + 1}, temporary)
            temporary.replace(SNAPSHOT)
    destroy_process_group()


if __name__ == "__main__":
    main()
