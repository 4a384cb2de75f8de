"""A plain loop over `trainer.samples`, which writes down the samples of each step, and may kill itself in one.

Arguments: a JSON object with `store` and its settings, `num_samples`, `batch_size`, `epochs`, `out` (a folder) and
`kill`: a rank, a step, and where in it: "before" its pushes, "between" the first server's push and the next one's, or
"after" the step. A worker that was started again does not kill itself. With `loader`, a DataLoader with a LeaseSampler
and two processes takes the place of `samples`. `compute_s` has the seconds that a rank's steps take longer. At step
`waits_at`, the workers wait until another one was started again. With `passes`, `samples` is called once per epoch,
and `between_s` has the seconds that a rank waits after each.
After its loop a worker writes what it is then, and makes the call `after`: "gather", or a new "trainer".
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
from echelon.cluster.messages import Push, Request
from echelon.kvstore.servers.client import Client, Ticket
from jobs import until


class Killer:
    """Kills this process in one step."""

    def __init__(self, kill: dict[str, Any] | None, rank: int) -> None:
        self._step = kill["step"] if kill is not None and kill["rank"] == rank else None
        self._where = kill["where"] if kill is not None else ""
        self.step = 0
        if self._step is not None and self._where == "between":
            self._watch_pushes()

    def reach(self, where: str) -> None:
        if (self.step, self._where) == (self._step, where):
            os.kill(os.getpid(), signal.SIGKILL)

    def _watch_pushes(self) -> None:
        send = Client.send

        def watched(client: Client, server: int, request: Request, *frames: Any, **places: Any) -> Ticket:
            if isinstance(request, Push) and server == 1:
                self.reach("between")
            return send(client, server, request, *frames, **places)

        setattr(Client, "send", watched)  # noqa: B010  (a method cannot be assigned)


def batches(trainer: echelon.Trainer, plan: dict[str, Any]) -> Iterator[Tensor]:
    if plan.get("passes"):
        for _ in range(plan["epochs"]):
            yield from trainer.samples(plan["num_samples"], plan["batch_size"])
            time.sleep(plan.get("between_s", {}).get(str(trainer.kvstore.rank), 0.0))
        return
    if not plan.get("loader"):
        yield from trainer.samples(plan["num_samples"], plan["batch_size"], epochs=plan["epochs"])
        return
    dataset = TensorDataset(torch.arange(plan["num_samples"]))
    sampler = echelon.LeaseSampler(trainer, len(dataset), plan["batch_size"], epochs=plan["epochs"])
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2, persistent_workers=True)
    while sampler.has_more:
        epoch = sampler.epoch
        for (index,) in loader:
            trainer.epoch = epoch
            yield index


def main() -> None:
    plan = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 40_000), nn.Linear(40_000, 2))
    trainer = echelon.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-3),
        plan["store"],
        staleness=plan.get("staleness"),
        groups=plan.get("groups"),
        lazy_pull=plan.get("lazy_pull", False),
    )
    rank = trainer.kvstore.rank
    is_first = not any(Path(plan["out"]).glob(f"{rank}.*"))
    killer = Killer(plan.get("kill") if is_first else None, rank)
    out = (Path(plan["out"]) / f"{rank}.{os.getpid()}").open("a")
    for index in batches(trainer, plan):
        print("begin", trainer.epoch, *index.tolist(), file=out, flush=True)
        killer.reach("before")
        model(index[:, None] * torch.ones(2)).mean().backward()
        time.sleep(plan.get("compute_s", {}).get(str(rank), 0.0))
        if killer.step == plan.get("waits_at"):
            until(lambda: len(list(Path(plan["out"]).iterdir())) > plan["num_workers"], "a worker started again", 60.0)
        trainer.step(len(index))
        print("end", trainer.epoch, *index.tolist(), file=out, flush=True)
        killer.reach("after")
        killer.step += 1
    state = [trainer.stopped, trainer.kvstore.is_first, trainer.kvstore.num_workers]
    (Path(plan["out"]).parent / f"after.{rank}").write_text(json.dumps(state))
    if plan.get("after") == "gather":
        trainer.gather(rank)
    trainer.close()
    if plan.get("after") == "trainer":
        echelon.Trainer(model, torch.optim.SGD(model.parameters(), lr=1e-3), plan["store"]).close()


if __name__ == "__main__":
    main()
