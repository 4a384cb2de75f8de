"""How much memory training needs, in real processes over shared memory."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from echelon.environment import Job
from echelon.launch.local.launcher import run

MB = 1 << 20
SERVER_ALLOWANCE = 64 * MB
SCRIPT = Path(__file__).with_name("memory_worker.py")


@pytest.mark.parametrize(("pull", "most"), [("lazy", 2.0), ("at once", 2.1)])
def test_memory_stays_within_its_bounds(pull: str, most: float) -> None:
    """In three steps, a worker grows by about twice the model: the store's memory of weights and gradients. With
    `lazy_pull` the model uses that memory, and its own is free. A server grows by its part of the weights and of the
    optimizer's state (the same size with momentum), and 64 MB. memory_worker.py describes what counts."""
    facts: list[dict[str, Any]] = []

    def take(name: str, text: str) -> None:
        print(f"[{name}] {text}")
        if name.startswith("worker") and text.startswith("{"):
            facts.append(json.loads(text))

    num_servers = 2
    job = Job(num_workers=2, num_servers=num_servers, transport="shm", timeout_s=60.0)
    assert run(job, [sys.executable, str(SCRIPT), pull], on_line=take) == 0
    assert len(facts) == 2
    for fact in facts:
        model, worker, segments = fact["model"], fact["worker"], fact["segments"]
        assert 48 * MB < model < 53 * MB
        assert 2 * model <= segments < 2.1 * model, "gradients and weights, once each: is memory shared?"
        assert worker <= most * model, f"a worker grew by {worker / model:.2f} models"
    [servers] = [fact["servers"] for fact in facts if fact["servers"]]
    assert len(servers) == num_servers
    for server in servers:
        stored = 2 * model / num_servers
        assert stored * 0.9 < server <= stored + SERVER_ALLOWANCE, f"{server / MB:.0f} MB for {stored / MB:.0f} MB"
