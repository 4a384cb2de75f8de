"""A worker keeps its memory after the first steps: later steps cause almost no page faults."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from echelon.environment import Job
from echelon.launch.local.launcher import run

SCRIPT = Path(__file__).with_name("faults_worker.py")
STEP_BYTES = 64 << 20  # of gradients alone


@pytest.mark.long
def test_gradients_and_activations_reuse_memory() -> None:
    facts: list[dict[str, int]] = []

    def take(name: str, text: str) -> None:
        print(f"[{name}] {text}")
        if text.startswith("{"):
            facts.append(json.loads(text))

    assert run(Job(num_workers=1, num_servers=1, timeout_s=60.0), [sys.executable, str(SCRIPT)], on_line=take) == 0
    [fact] = facts
    assert fact["faults"] * fact["page_bytes"] < STEP_BYTES / 16
