"""With a backup, a job that loses servers ends with the weights of an undisturbed one, bit for bit.

The bits are equal on one machine: all jobs of a test use the same kernels and one thread.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from echelon.testing.faults import Fault, Kind, check_fired, faults_in
from jobs import TESTS, Job

pytestmark = pytest.mark.long

STEPS = 120
PAUSE_S = 3.0  # that a step may take longer
RECEIVED, APPLIED = "server.push", "server.applied"


def train(folder: Path, optimizer: str, *options: str, faults: Sequence[Fault] = ()) -> tuple[str, float]:
    """Run a job of two workers and two servers. Return the hash of its weights and the seconds of the longest step."""
    command = [sys.executable, str(TESTS / "faults" / "trained_weights.py"), optimizer, str(STEPS)]
    with Job(
        folder, num_servers=2, num_workers=2, command=command, options=options, environment=faults_in(faults)
    ) as job:
        assert job.wait() == 0, job.out + job.err
        check_fired(job.run, faults)
        found = re.findall(r"weights (\w{64}), longest step ([\d.]+) s", job.out)
    assert len(found) == 2
    (weights,) = {one for one, _ in found}
    return weights, max(float(seconds) for _, seconds in found)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("optimizer", ["SGD", pytest.param("Adam", marks=pytest.mark.long)])
def test_weights_of_a_job_that_lost_a_server(optimizer: str, transport: str, tmp_path: Path) -> None:
    undisturbed, _ = train(tmp_path / "undisturbed", optimizer, "--transport", transport)
    for server, point in ((0, RECEIVED), (1, APPLIED)):
        faults = [Fault(Kind.CRASH, "server", server, clock=40, point=point)]
        options = ("--transport", transport, "--replicas", "1")
        weights, longest_s = train(tmp_path / f"server {server}", optimizer, *options, faults=faults)
        assert weights == undisturbed, f"server {server} was killed at {point}"
        assert longest_s < PAUSE_S


def test_without_a_backup_the_weights_are_others(tmp_path: Path) -> None:
    """The weights show a lost server: the optimizer's state is lost with it."""
    undisturbed, _ = train(tmp_path / "undisturbed", "SGD")
    faults = [Fault(Kind.CRASH, "server", 0, clock=40, point=APPLIED)]
    weights, _ = train(tmp_path / "disturbed", "SGD", faults=faults)
    assert weights != undisturbed
