"""Values that are exchanged in the middle of a step, when clipped gradients are on the servers and not applied yet."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from jobs import TESTS, Job

PROGRAM = str(TESTS / "faults" / "exchange_in_step.py")


def weights(folder: Path, *arguments: str) -> list[str]:
    """Return the digest of the final weights of each worker that ends."""
    command = [sys.executable, PROGRAM, *arguments]
    with Job(folder, num_servers=1, num_workers=2, command=command, options=["--max-restarts", "0"]) as job:
        assert job.wait(60.0) == 0, job.out + job.err
    return re.findall(r"weights ([0-9a-f]{64})", job.out)


def test_an_exchange_between_backward_and_step_changes_nothing(tmp_path: Path) -> None:
    plain = weights(tmp_path / "plain", "plain", "nobody")
    assert weights(tmp_path / "exchange", "exchange", "nobody") == plain
    assert len(plain) == 2
    assert len(set(plain)) == 1


def test_a_death_before_the_exchange_holds_nobody_up(tmp_path: Path) -> None:
    assert len(weights(tmp_path, "exchange", "1")) == 1
