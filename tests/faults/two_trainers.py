"""Two Trainers whose steps use the samples of the first one, as a GAN's do. Each worker writes down its samples.

Arguments: a JSON object with `store` and its settings (`options`), `num_samples`, `batch_size`, `epochs`, `out` (a
folder), `order` (the Trainers, 0 and 1, in the order of their steps) and `loader`: use a DataLoader with a
LeaseSampler. `slow_s` is how long a step of rank 1 takes longer. The rank `dies` kills itself once, after some steps.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import echelon


def batches(trainer: echelon.Trainer, plan: dict[str, Any]) -> Iterator[Tensor]:
    sizes = plan["num_samples"], plan["batch_size"]
    if not plan["loader"]:
        yield from trainer.samples(*sizes, epochs=plan["epochs"])
        return
    sampler = echelon.LeaseSampler(trainer, *sizes, epochs=plan["epochs"])
    loader = DataLoader(TensorDataset(torch.arange(sizes[0])), batch_sampler=sampler)
    while sampler.has_more:
        for (index,) in loader:
            yield index


def main() -> None:
    plan = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    models = [nn.Linear(1, 1), nn.Linear(1, 1)]
    trainers = [
        echelon.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), plan["store"], **plan["options"])
        for model in models
    ]
    rank = trainers[0].kvstore.rank
    seen: list[int] = []
    first = Path(plan["out"]) / f"started-{rank}"
    dies = plan.get("dies") == rank and not first.exists()
    first.touch()
    for index in batches(trainers[0], plan):
        time.sleep(plan["slow_s"] if rank == 1 else plan.get("other_slow_s", 0))
        if dies and len(seen) >= 4:
            os.kill(os.getpid(), signal.SIGKILL)
        sum(model(index.float()[:, None]).sum() for model in models).backward()
        for number in plan["order"]:
            trainers[number].step(len(index))
        seen += index.tolist()
    for trainer in trainers:
        trainer.close()
    weights = [[parameter.tolist() for parameter in model.parameters()] for model in models]
    (Path(plan["out"]) / f"{rank}.weights").write_text(json.dumps(weights))
    (Path(plan["out"]) / f"{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
