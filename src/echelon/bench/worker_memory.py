"""A worker that puts a model into the store, steps, and says how much memory it and the servers took for it.

Counted is a process's own memory: anonymous pages (RssAnon) and, for a worker, the shared segments it owns (each
worker's segments once, with the worker, although servers map them too).
"""

import json
import os
import sys
from pathlib import Path

import psutil
import torch

from echelon import kvstore
from echelon.bench.pushpull.shapes import read_shapes
from echelon.kvstore.servers.store import ServerStore


def anonymous(pid: int) -> int:
    """RssAnon of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


def segments() -> int:
    """Bytes of memory that are really there in this process's memfds."""
    sizes: dict[int, int] = {}  # by inode: a mapping has a descriptor of its own
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if "memfd:echelon" in str(entry.readlink()):
                status = os.stat(entry)
                sizes[status.st_ino] = status.st_blocks * 512
        except OSError:
            continue
    return sum(sizes.values())


def servers() -> dict[int, int]:
    """Rank and pid of the servers, which are this process's siblings."""
    parent = psutil.Process(os.getppid())
    found = {}
    for child in parent.children():
        if "echelon.server" in child.cmdline():
            found[int(child.environ()["ECHELON_RANK"])] = child.pid
    return found


def main() -> None:
    """Measure empty, then full."""
    torch.set_num_threads(1)
    shapes = read_shapes(Path(sys.argv[1]))
    with kvstore.create("dist_sync") as store:
        assert isinstance(store, ServerStore)
        store.init("small", torch.zeros(1))
        store.set_optimizer("sgd", lr=0.1, momentum=0.9, weight_decay=1e-4)
        store.pushpull("small", torch.zeros(1))
        siblings = servers() if store.rank == 0 else {}
        store.barrier()
        before = {rank: anonymous(pid) for rank, pid in siblings.items()}
        own = anonymous(os.getpid())
        names = [str(index) for index in range(len(shapes))]
        store.init(names, [torch.zeros(1).expand(shape) for shape in shapes])
        keys = [store.key_number(name) for name in names]
        for name in names:
            store.views(name)[1].fill_(1e-3)
        for _ in range(3):
            store.wait(store.exchange(keys, 1.0, []))
        store.barrier()
        worker = {"private": anonymous(os.getpid()) - own, "segments": segments()}
        print(json.dumps({"who": f"worker {store.rank}", **worker}), flush=True)
        for rank, pid in siblings.items():
            print(json.dumps({"who": f"server {rank}", "private": anonymous(pid) - before[rank]}), flush=True)


if __name__ == "__main__":
    main()
