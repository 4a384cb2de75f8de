"""Lost, repeated and late messages, for every scheme: each gradient is applied once, and no worker waits forever."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from message_faults import ACTIONS, Action, message_fault

from echelon.faults import Fault, Faults
from echelon.kvstore import KVStore
from echelon.launch.threads import in_process
from echelon.transport.faulty import FaultyTransport
from echelon.transport.in_process import InProcessTransport

CLOCKS = 8
WORKERS = 2
SETUP = ("Configure", "Place", "Attach", "Init", "SetOptimizer")
STORES = [
    pytest.param("dist_sync", None, None, id="sync"),
    pytest.param("dist_async", None, None, id="async"),
    pytest.param("dist_ssync", 1, None, id="ssync"),
    pytest.param("dist_gsync", None, [[0, 1]], id="gsync"),
]


def program(kv: KVStore) -> list[list[float]]:
    """Return a table of how often each gradient was applied, as in jobs.py."""
    weights = [torch.zeros(CLOCKS, WORKERS), torch.zeros(CLOCKS, WORKERS, 2048)]
    kv.init(["narrow", "wide"], weights)
    kv.set_optimizer("sgd", lr=1.0)
    for clock in range(CLOCKS):
        gradients = [torch.zeros_like(weight) for weight in weights]
        for gradient in gradients:
            gradient[clock, kv.rank] = 1
        if clock % 2:
            kv.pushpull(["narrow", "wide"], gradients, out=weights)
        else:
            kv.push(["narrow", "wide"], gradients)
            kv.pull(["narrow", "wide"], weights)
    kv.retire()
    kv.barrier()
    kv.pull(["narrow", "wide"], weights)
    assert bool((weights[1] == weights[0].unsqueeze(2)).all())
    table: list[list[float]] = weights[0].tolist()
    return table


def faults(action: Action) -> list[Fault]:
    """Return one fault for every kind of request, on either worker."""
    setup = [message_fault(action, 0, kind) for kind in SETUP]
    steps = [
        message_fault(action, 0, "Push", 2),
        message_fault(action, 1, "Push", 3),  # of a pushpull
        message_fault(action, 0, "Pull", 4),
        message_fault(action, 1, "Pull", 6),
        message_fault(action, 1, "Push", 7),
    ]
    return [*setup, *steps, message_fault(action, 1, "Retire")]


@pytest.mark.parametrize("framed", [pytest.param(False, id="shared"), pytest.param(True, id="framed")])
@pytest.mark.parametrize(("store", "staleness", "groups"), STORES)
def test_every_gradient_is_applied_once(
    store: str, staleness: int | None, groups: list[list[int]] | None, framed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echelon.kvstore.servers.client.ASK_AFTER_S", 0.05)
    for action in ACTIONS:
        wanted = faults(action)
        transport = FaultyTransport(InProcessTransport(), Faults(wanted), framed=framed)
        tables = in_process.run(
            program, store, num_workers=WORKERS, staleness=staleness, groups=groups, transport=transport
        )
        assert Counter(transport.fired) == Counter(wanted), f"{action}: every fault fired"
        assert tables == [[[-1.0] * WORKERS] * CLOCKS] * WORKERS, action
