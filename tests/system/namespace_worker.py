"""test_namespaces runs this program in every role: it pushes rank + 1 and prints the sum."""

import sys

import torch

from echelon import kvstore
from echelon.kvstore.servers.store import ServerStore

kv = kvstore.create(sys.argv[1])
assert isinstance(kv, ServerStore)
kv.init("x", torch.zeros(100_000))
out = torch.zeros(100_000)
kv.pushpull("x", torch.full((100_000,), kv.rank + 1.0), out)
print(f"worker {kv.rank} on {kv.host}: sum {out.mean().item()} shared {kv.memory_is_shared}", flush=True)
kv.close()
