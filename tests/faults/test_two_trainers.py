"""Two Trainers that use the samples of one of them end every epoch, also if a worker has none in its last round."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from jobs import Job

PROGRAM = Path(__file__).with_name("two_trainers.py")
SAMPLES, EPOCHS = 5, 3


@pytest.mark.parametrize(
    ("order", "loader"),
    [
        ((0, 1), False),
        ((0, 1), True),
        *(pytest.param(order, False, marks=pytest.mark.long) for order in ((1, 0), (0,), (0, 1, 1))),
    ],
)
def test_a_worker_without_samples_takes_part_in_the_rounds_of_both(
    order: tuple[int, ...], loader: bool, tmp_path: Path
) -> None:
    run(tmp_path, {"store": "dist_sync", "options": {}, "order": order, "loader": loader, "slow_s": 0})


def test_a_worker_that_waits_for_samples_holds_up_no_trainer(tmp_path: Path) -> None:
    options = {"staleness": 0}
    run(tmp_path, {"store": "dist_ssync", "options": options, "order": (0, 1), "loader": False, "slow_s": 0.2}, 40)


def run(folder: Path, plan: dict[str, Any], num_samples: int = SAMPLES) -> None:
    plan |= {"num_samples": num_samples, "batch_size": 2, "epochs": EPOCHS, "out": str(folder)}
    command = [sys.executable, str(PROGRAM), json.dumps(plan)]
    with Job(folder / "job", num_servers=1, num_workers=2, command=command) as job:
        status = job.wait(30.0)
        print(job.err[-3000:])
        assert status == 0
    seen = Counter(sample for rank in range(2) for sample in json.loads((folder / f"{rank}.json").read_text()))
    assert seen == dict.fromkeys(range(num_samples), EPOCHS)


SSYNC_0, SSYNC_2, ONE_GROUP = {"staleness": 0}, {"staleness": 2}, {"groups": [[0, 1]]}


@pytest.mark.parametrize(
    ("store", "options", "order", "refused"),
    [
        pytest.param("dist_sync", {}, (0, 1), True, id="sync-01"),
        pytest.param("dist_sync", {}, (1, 0), True, id="sync-10", marks=pytest.mark.long),
        pytest.param("dist_sync", {}, (0,), False, id="sync-0"),
        pytest.param("dist_ssync", SSYNC_0, (0, 1), True, id="ssync0-01"),
        pytest.param("dist_ssync", SSYNC_2, (0, 1), False, id="ssync2-01", marks=pytest.mark.long),
        pytest.param("dist_ssync", SSYNC_2, (1, 0), False, id="ssync2-10", marks=pytest.mark.long),
        pytest.param("dist_gsync", ONE_GROUP, (0, 1), True, id="gsync-01", marks=pytest.mark.long),
        pytest.param("dist_gsync", ONE_GROUP, (0,), False, id="gsync-0", marks=pytest.mark.long),
    ],
)
def test_a_worker_that_is_started_again_holds_up_nobody(
    store: str, options: dict[str, Any], order: tuple[int, ...], refused: bool, tmp_path: Path
) -> None:
    """Where workers wait closely, it cannot join the rounds of two Trainers at the same step: it says so and ends."""
    plan = {"store": store, "options": options, "order": order, "dies": 1}
    plan |= {"loader": False, "slow_s": 0.02, "other_slow_s": 0.05, "num_samples": 300, "batch_size": 2, "epochs": 2}
    command = [sys.executable, str(PROGRAM), json.dumps(plan | {"out": str(tmp_path)})]
    with Job(tmp_path / "job", num_servers=1, num_workers=2, command=command, options=["--max-restarts", "2"]) as job:
        status = job.wait(60.0)
        output = job.out + job.err
        print(output[-4000:])
        assert status == 0
    assert ("cannot join a running job that steps two Trainers" in output) == refused
    assert (tmp_path / "1.json").exists() != refused
