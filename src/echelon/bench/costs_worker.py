"""The worker of `echelon bench costs`: puts a model into the store, steps, and prints the memory used for the model.

The memory of a process is its anonymous pages (RssAnon) and, for a worker, the shared segments that it owns. A segment
counts once, for its worker, although servers map it too.
"""

import json
import os
import sys
from pathlib import Path

import torch

from echelon import kvstore
from echelon.bench.pushpull.shapes import shapes
from echelon.cluster.messages import PushHeader
from echelon.kvstore.servers.store import ServerStore


def anonymous_bytes(pid: int) -> int:
    """Return the RssAnon of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


def segment_bytes() -> int:
    """Return the allocated bytes of this process's memfds."""
    sizes: dict[int, int] = {}  # by inode, because several descriptors may refer to one segment
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if "memfd:echelon" in str(entry.readlink()):
                status = os.stat(entry)
                sizes[status.st_ino] = status.st_blocks * 512
        except OSError:
            continue
    return sum(sizes.values())


def main() -> None:
    """Measure with an empty store, then with the model in it."""
    torch.set_num_threads(1)
    tensors = shapes(sys.argv[1])
    with kvstore.create("dist_sync") as store:
        assert isinstance(store, ServerStore)
        store.init("small", torch.zeros(1))
        store.set_optimizer("sgd", lr=0.1, momentum=0.9, weight_decay=1e-4)
        store.pushpull("small", torch.zeros(1))
        siblings = {server.rank: server.pid for server in store.servers} if store.rank == 0 else {}
        store.barrier()
        before = {rank: anonymous_bytes(pid) for rank, pid in siblings.items()}
        own = anonymous_bytes(os.getpid())
        names = [str(index) for index in range(len(tensors))]
        store.init(names, [torch.zeros(1).expand(shape) for shape in tensors])
        slots = store.slots(names)
        for name in names:
            store.views(name)[1].fill_(1e-3)
        for _ in range(3):
            store.wait(store.push_bucket(slots, PushHeader(1.0)))
        store.barrier()
        worker = {"private": anonymous_bytes(os.getpid()) - own, "segments": segment_bytes()}
        print(json.dumps({"who": f"worker {store.rank}", **worker}), flush=True)
        for rank, pid in siblings.items():
            print(json.dumps({"who": f"server {rank}", "private": anonymous_bytes(pid) - before[rank]}), flush=True)


if __name__ == "__main__":
    main()
