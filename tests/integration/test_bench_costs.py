"""`echelon bench costs` with real jobs: what a start takes, and whose memory is counted."""

from __future__ import annotations

import pytest

from echelon.bench import costs
from echelon.errors import JobError


@pytest.mark.long
def test_the_memory_of_every_process_is_counted() -> None:
    found = costs.memory_mb("keys:4:1000000")
    assert set(found) == {"worker 0", "worker 1", "server 0", "server 1", "model"}
    assert found["model"] == {"bytes": 16.0}
    assert found["worker 0"]["segments"] == pytest.approx(32.0, rel=0.05)  # gradients and weights
    assert found["server 0"]["private"] >= 16.0 * 0.95  # half of the weights and of the momentum


def test_a_job_that_fails_is_an_error_with_its_last_lines() -> None:
    with pytest.raises(JobError, match=r"ended with status 3:(.|\n)*no memory left"):
        costs.job_lines("-c", "import sys; print('no memory left'); sys.exit(3)")
