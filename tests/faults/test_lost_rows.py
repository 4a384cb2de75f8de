"""Lost, repeated and late messages of tables: every row is updated once, and every worker gets all changed rows."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from message_faults import ACTIONS, REPEAT_LATE, Action, message_fault
from torch import Tensor, nn
from torch.optim import SGD

import echelon
from echelon.faults import Fault, Faults
from echelon.kvstore import KVStore
from echelon.launch.threads import in_process
from echelon.transport.faulty import FaultyTransport
from echelon.transport.in_process import InProcessTransport

CLOCKS, WORKERS = 6, 2
ROWS = CLOCKS * WORKERS + 1
STORES = [
    pytest.param("dist_sync", None, None, id="sync"),
    pytest.param("dist_async", None, None, id="async"),
    pytest.param("dist_ssync", 1, None, id="ssync"),
    pytest.param("dist_gsync", None, [[0], [1]], id="gsync"),
]


def program(kv: KVStore) -> Tensor:
    """Add 1 to a row of this worker and clock, and to the last row. Return the table that the worker has at the end."""
    table = nn.Embedding(ROWS, 2, sparse=True)
    nn.init.zeros_(table.weight)
    with echelon.Trainer(table, SGD(table.parameters(), lr=1.0, maximize=True), kv) as trainer:
        for clock in range(CLOCKS):
            own = clock * WORKERS + kv.rank
            (table(torch.tensor([own, ROWS - 1])) * kv.num_workers).sum().backward()
            trainer.step(1)
            assert float(table.weight[own].detach().min()) > 0, "a worker reads its own update"
        kv.retire()
        kv.barrier()
        trainer.refresh()
        return table.weight.detach().clone()


def faults(action: Action) -> list[Fault]:
    pushes = [message_fault(action, clock % WORKERS, "Push", clock) for clock in range(1, CLOCKS)]
    return [message_fault(action, 0, "PutRows"), *pushes, message_fault(action, 1, "PullChanges", CLOCKS)]


@pytest.mark.parametrize(("store", "staleness", "groups"), STORES)
def test_every_row_is_updated_once(
    store: str, staleness: int | None, groups: list[list[int]] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echelon.kvstore.servers.client.ASK_AFTER_S", 0.05)
    for action in ACTIONS:
        wanted = faults(action)
        transport = FaultyTransport(InProcessTransport(), Faults(wanted))
        tables = in_process.run(
            program, store, num_workers=WORKERS, staleness=staleness, groups=groups, transport=transport
        )
        if action != REPEAT_LATE:  # which needs another request of the same kind
            assert Counter(transport.fired) == Counter(wanted), f"{action}: every fault fired"
        for table in tables:
            assert torch.equal(table, tables[0]), action
        if store == "dist_sync":
            assert tables[0][:, 0].tolist() == [1.0] * (ROWS - 1) + [float(CLOCKS * WORKERS)], action
        else:
            assert bool((tables[0] > 0).all()), action
