"""The worker of `echelon bench large`: pushes and pulls all tensors of a model, and prints times and peak memory."""

import json
import os
import sys
import time
from pathlib import Path

import torch

from echelon import kvstore
from echelon.bench.pushpull.shapes import shapes
from echelon.cluster.messages import PushHeader
from echelon.kvstore.servers.store import ServerStore


def peak_bytes(pid: int) -> int:
    """Return the largest resident memory that a process has had. Each process that maps a segment counts it."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0


def main() -> None:
    """Make some steps; worker 0 also prints the memory of the servers."""
    torch.set_num_threads(1)
    name, model, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    tensors = shapes(model)
    with kvstore.create(name) as store:
        assert isinstance(store, ServerStore)
        store.set_optimizer("sgd", lr=0.1)
        names = [str(index) for index in range(len(tensors))]
        store.init(names, [torch.zeros(1).expand(shape) for shape in tensors])
        slots = store.slots(names)
        for key in names:
            store.views(key)[1].fill_(1e-3)
        seconds = []
        for _ in range(steps):
            began = time.perf_counter()
            store.wait(store.push_bucket(slots, PushHeader(1.0)))
            seconds.append(time.perf_counter() - began)
        store.barrier()
        servers = {server.rank: server.pid for server in store.servers} if store.rank == 0 else {}
        peaks = {f"server {rank}": peak_bytes(pid) for rank, pid in servers.items()}
        peaks[f"worker {store.rank}"] = peak_bytes(os.getpid())
        print(json.dumps({"seconds": seconds, "peaks": peaks}), flush=True)
        store.barrier()


if __name__ == "__main__":
    main()
