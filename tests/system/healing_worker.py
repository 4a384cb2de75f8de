"""A training loop over leased samples, for test_partitions. Each step is a line with its time in `clocks-RANK`."""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path

import torch

import echelon

SAMPLES, BATCH_SIZE, EPOCHS = 2048, 16, 14

folder = Path(sys.argv[2])
torch.set_num_threads(1)
kv = echelon.kvstore.create(sys.argv[1])
torch.manual_seed(7)
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
data = torch.Generator().manual_seed(1)
images, labels = torch.randn(SAMPLES, 64, generator=data), torch.randint(10, (SAMPLES,), generator=data)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
with (
    echelon.Trainer(model, optimizer, kv) as trainer,
    (folder / f"clocks-{kv.rank}").open("a", buffering=1) as progress,
):
    for index in trainer.samples(SAMPLES, BATCH_SIZE, epochs=EPOCHS):
        print(time.time(), file=progress)
        time.sleep(0.05)  # computes
        torch.nn.functional.cross_entropy(model(images[index]), labels[index]).backward()
        trainer.step(len(index))
bits = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
print(f"worker {kv.rank} has weights {hashlib.sha256(bits).hexdigest()}", flush=True)
