"""test_strangers runs this worker: it waits for a file between two steps, and prints the weights at the end."""

import sys
import time
from pathlib import Path

import torch

from echelon import kvstore

VALUE = 1.2345678  # its bytes are looked for on the network
kv = kvstore.create("dist_sync")
kv.init("weights", torch.full((10_000,), VALUE))
out = torch.zeros(10_000)
kv.pushpull("weights", torch.full((10_000,), VALUE), out)
print("waits", flush=True)
while not Path(sys.argv[1]).exists():
    time.sleep(0.02)
kv.pushpull("weights", torch.full((10_000,), VALUE), out)
print(f"weights {sorted(set(out.tolist()))}", flush=True)
kv.close()
