"""A small training that the tests of all launchers run: the last line has a digest of the final weights' bits."""

import hashlib

import torch

import echelon
from echelon.kvstore.servers.store import ServerStore

STEPS = 5

torch.set_num_threads(1)
kv = echelon.kvstore.create("dist_sync")
assert isinstance(kv, ServerStore)
torch.manual_seed(7)
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
data = torch.Generator().manual_seed(kv.rank)
with echelon.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), kv) as trainer:
    for _ in range(STEPS):
        x, y = torch.randn(16, 64, generator=data), torch.randint(10, (16,), generator=data)
        torch.nn.functional.cross_entropy(model(x), y).backward()
        trainer.step(16)
bits = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
print(f"worker {kv.rank} on {kv.host} has weights {hashlib.sha256(bits).hexdigest()}", flush=True)
