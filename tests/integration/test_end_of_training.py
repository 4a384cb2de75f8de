"""After close() the model has everybody's updates, and nothing waits for a worker that has left."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from plain_loops import seeded
from torch import Tensor, nn
from torch.optim import SGD

import echelon
from echelon.kvstore import KVStore
from echelon.kvstore.servers.store import ServerStore
from echelon.launch.threads.in_process import run

STORES = pytest.mark.parametrize("store", ["dist_sync", "dist_async", "dist_ssync"])


def steps(trainer: echelon.Trainer, count: int) -> None:
    for number in range(count):
        trainer.model(torch.full([2, 3], number + 1.0)).square().mean().backward()
        trainer.step(2)


@STORES
@pytest.mark.parametrize("end", ["close", "leave"])
def test_the_worker_that_ends_first_has_the_updates_of_the_last(store: str, end: str) -> None:
    """Worker 1 makes steps after worker 0 has called close(); then it closes its Trainer or leaves without that."""
    model = seeded(lambda: nn.Linear(3, 2))
    closing = threading.Event()

    def program(kv: KVStore) -> Tensor:
        mine = copy.deepcopy(model)
        trainer = echelon.Trainer(mine, SGD(mine.parameters(), lr=0.1), kv)
        steps(trainer, 1)
        if kv.rank == 0:
            closing.set()
            trainer.close()
        else:
            assert closing.wait(30)
            steps(trainer, 4)
            kv.barrier()  # does not wait for worker 0
            trainer.sync()
            if end == "close":
                trainer.close()
        return mine.get_parameter("weight").detach().clone()

    first, last = run(program, store, staleness=1 if store == "dist_ssync" else None)
    assert torch.equal(first, last)
    assert not torch.equal(first, model.get_parameter("weight"))


def test_a_worker_that_has_retired_waits_for_nobody_in_close() -> None:
    closed = threading.Event()

    def program(kv: KVStore) -> bool:
        mine = nn.Linear(3, 2)
        trainer = echelon.Trainer(mine, SGD(mine.parameters(), lr=0.1), kv)
        if kv.rank == 0:
            kv.retire()
            trainer.close()
            closed.set()
            return True
        return closed.wait(30)

    assert run(program, "dist_async") == [True, True]


def test_a_worker_that_waits_says_for_whom(capfd: pytest.CaptureFixture[str]) -> None:
    def program(kv: KVStore) -> None:
        assert isinstance(kv, ServerStore)
        if kv.rank == 0:
            kv._session.wait_for_end(stall_seconds=0.01)
            return
        lines = ""
        while "s for the last updates of worker 1" not in lines:
            lines += capfd.readouterr().err
        assert lines.startswith("worker 0 has closed its Trainer, and waited 0 s")

    run(program, "dist_async")
