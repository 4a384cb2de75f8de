"""A worker that trains a model of about 50 MB and prints how much memory it used, and (rank 0) every server.

It measures resident memory, from /proc/PID/smaps. `own` is every page without a file (heap, stacks, anonymous maps,
private or shared), `segments` are the pages of the memfds in which workers share gradients and weights. Segments count
for the worker; a server maps them, too, but they do not count there.

Before each measurement of itself, the worker returns memory that its allocator keeps for reuse (malloc_trim). Otherwise
the figure would vary by the memory of freed tensors, up to that of a few of the largest layers.

The first measurement is after a small job in this process, so that it includes what torch loads once. At that time the
model exists, without gradients.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path

import psutil
import torch
from torch import nn

import echelon
from echelon.kvstore import create

WIDTH = 1870  # 3 layers of 14 MB and one of 10 MB


def resident(pid: int) -> tuple[int, int]:
    """Return the resident bytes of a process that have no file, and those in Echelon's segments."""
    own = segments = 0
    where = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            where = " ".join(words[5:])
        elif words[0] == "Rss:":
            size = int(words[1]) * 1024
            if "memfd:echelon" in where:
                segments += size
            elif not where.startswith("/") or where.startswith("/dev/zero"):
                own += size
    return own, segments


def resident_trimmed() -> tuple[int, int]:
    """Return `resident` of this process, without free memory."""
    ctypes.CDLL(None).malloc_trim(0)
    return resident(os.getpid())


def servers() -> list[int]:
    """Return the process ids of the servers, which are siblings of this process."""
    siblings = psutil.Process(os.getppid()).children()
    return [p.pid for p in siblings if p.status() != psutil.STATUS_ZOMBIE and "echelon.server" in p.cmdline()]


def step(model: nn.Module, trainer: echelon.Trainer) -> None:
    """Train one small batch."""
    model(torch.ones(2, WIDTH)).square().mean().backward()
    trainer.step(2)
    trainer.sync()


def main() -> None:
    """Measure, train, measure."""
    torch.set_num_threads(1)
    kv = create("dist_sync")
    small = nn.Linear(WIDTH, 2)
    with_small = echelon.Trainer(small, torch.optim.SGD(small.parameters(), lr=1e-3, momentum=0.9), "dist_sync")
    step(small, with_small)
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)] + [nn.Linear(WIDTH, 1400)]
    model = nn.Sequential(*(nn.Sequential(layer, nn.Tanh()) for layer in layers))
    model_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    kv.barrier()
    before = resident_trimmed()
    pids = servers() if kv.rank == 0 else []
    servers_before = {pid: resident(pid)[0] for pid in pids}
    kv.barrier()
    trainer = echelon.Trainer(
        model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), kv, lazy_pull=sys.argv[1] == "lazy"
    )
    for _ in range(3):
        step(model, trainer)
    kv.barrier()
    after = resident_trimmed()
    facts = {
        "model": model_bytes,
        "worker": sum(after) - sum(before),
        "segments": after[1] - before[1],
        "servers": [resident(pid)[0] - servers_before[pid] for pid in pids],
    }
    print(json.dumps(facts), flush=True)
    kv.barrier()
    trainer.close()


if __name__ == "__main__":
    main()
