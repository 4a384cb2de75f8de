"""A user's script that runs in every role. Its first argument selects a failure."""

from __future__ import annotations

import os
import signal
import sys

import torch

from echelon import kvstore

MODE = sys.argv[1]
print("imported", flush=True)
if MODE == "unknown store" and os.environ["ECHELON_RANK"] == "1":
    kv = kvstore.create("dist_snyc")
kv = kvstore.create("dist_device_sync" if MODE == "no servers" else "dist_sync")
print(f"rank {kv.rank} of {kv.num_workers}", flush=True)
if MODE == "shapes" and kv.rank == 1:
    kv.init("v", torch.zeros(2))  # returns when worker 0 has both keys
    kv.init("w", torch.zeros(3))
kv.init(["v", "w"], [torch.zeros(2), torch.zeros(2)])
if MODE == "exit" and kv.rank == 1:
    print("no newline at the end", end="")
    sys.exit(3)
if MODE == "wait":
    print("at work", flush=True)
    if kv.rank == 0:
        kv.barrier()
    signal.pause()
if MODE == "deaf":  # it is in a long step, and then notices that it should stop
    signal.signal(signal.SIGINT, lambda *_: print("noted", flush=True))
    print("at work", flush=True)
    while True:
        signal.pause()
kv.push("w", torch.full((2,), float(kv.rank + 1)))
out = torch.zeros(2)
kv.pull("w", out=out)
print(f"result {out.tolist()}", flush=True)
