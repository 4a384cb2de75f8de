"""Clipping by the global norm with lost, repeated and late messages: each round is applied once, with its norm."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from clipped_rounds import BEFORE_NORM, BETWEEN_TOTALS, CLOCKS, DEATH, Rounds, in_one_process, run_rounds
from message_faults import ACTIONS, Action, message_fault

from echelon.errors import NOT_WHOLE
from echelon.faults import Faults
from echelon.launch.threads import in_process
from echelon.transport.faulty import FaultyTransport
from echelon.transport.in_process import InProcessTransport
from jobs import Job
from tolerances import reordering

PROGRAM = Path(__file__).with_name("clipped_rounds.py")
KINDS = ("Push", "MeasureNorm", "ApplyScaled")


def check(results: Sequence[Rounds], workers_of: Callable[[int], Sequence[int]]) -> None:
    """Compare the results of a group's workers with one process."""
    norms, weights = in_one_process(workers_of)
    tolerance = reordering(torch.float32, sum(weight.numel() for weight in weights), CLOCKS)
    for found, last in results:
        assert found == results[0][0], "the same number for all workers of a group"
        assert found == pytest.approx(norms, rel=tolerance)
        torch.testing.assert_close(last, weights, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("framed", [pytest.param(False, id="shared"), pytest.param(True, id="framed")])
@pytest.mark.parametrize("num_servers", [1, 2, 3])
def test_three_workers_clip_the_mean(num_servers: int, framed: bool) -> None:
    transport = FaultyTransport(InProcessTransport(), Faults([]), framed=framed)
    results = in_process.run(run_rounds, "dist_sync", num_workers=3, num_servers=num_servers, transport=transport)
    check(results, lambda _: [0, 1, 2])


def test_two_runs_have_the_same_bits() -> None:
    first, second = (in_process.run(run_rounds, "dist_sync", num_workers=3, num_servers=2)[0] for _ in range(2))
    assert first[0] == second[0]
    assert all(torch.equal(one, other) for one, other in zip(first[1], second[1], strict=True))


def test_each_group_clips_its_own_mean() -> None:
    results = in_process.run(run_rounds, "dist_gsync", num_workers=3, num_servers=2, groups=[[0, 2], [1]])
    tolerance = reordering(torch.float32, 70_015, CLOCKS)
    assert results[0][0] == results[2][0]
    assert results[0][0] == pytest.approx(in_one_process(lambda _: [0, 2])[0], rel=tolerance)
    assert results[1][0] == pytest.approx(in_one_process(lambda _: [1])[0], rel=tolerance)


@pytest.mark.parametrize("action", ACTIONS, ids="-".join)
@pytest.mark.parametrize("num_servers", [1, 2])
def test_lost_and_repeated_messages_change_nothing(
    num_servers: int, action: Action, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echelon.kvstore.servers.client.ASK_AFTER_S", 0.05)
    kinds = KINDS if num_servers > 1 else KINDS[:2]  # one server needs no exchange
    faults = [message_fault(action, rank, kind, 1 + 2 * rank) for rank in (0, 1) for kind in kinds]
    faults += [message_fault(action, 1, "Push", 0)]  # before the keys of a push are a lane
    transport = FaultyTransport(InProcessTransport(), Faults(faults))
    results = in_process.run(run_rounds, "dist_sync", num_workers=2, num_servers=num_servers, transport=transport)
    assert Counter(transport.fired) == Counter(faults)
    check(results, lambda _: [0, 1])


@pytest.mark.parametrize("point", [BEFORE_NORM, BETWEEN_TOTALS])
def test_a_worker_that_dies_between_push_and_total_holds_nobody(tmp_path: Path, point: str) -> None:
    """What it pushed counts in its last round. The others apply that round with one norm, and continue."""
    with Job(tmp_path, num_workers=3, num_servers=2, command=[sys.executable, str(PROGRAM), point]) as job:
        assert job.wait() == NOT_WHOLE, job.out
    survivors = [torch.load(job.run / f"rounds-{rank}.pt") for rank in (0, 1)]
    check(survivors, lambda clock: [0, 1, 2] if clock <= DEATH else [0, 1])
