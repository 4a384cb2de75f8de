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


@pytest.mark.parametrize(
    ("store", "order"),
    [
        pytest.param("dist_sync", (0, 1), id="sync-01"),
        pytest.param("dist_sync", (1, 0), id="sync-10", marks=pytest.mark.long),
        pytest.param("dist_sync", (0,), id="sync-0"),
        pytest.param("dist_ssync", (0, 1), id="ssync-01", marks=pytest.mark.long),
    ],
)
def test_a_worker_that_is_started_again_holds_up_nobody(store: str, order: tuple[int, ...], tmp_path: Path) -> None:
    """In lock-step it cannot join the rounds of two Trainers at the same step of the loop, so it says so and ends."""
    plan = {"store": store, "options": {"staleness": 2} if store == "dist_ssync" else {}, "order": order, "dies": 1}
    plan |= {"loader": False, "slow_s": 0.02, "other_slow_s": 0.05, "num_samples": 300, "batch_size": 2, "epochs": 2}
    command = [sys.executable, str(PROGRAM), json.dumps(plan | {"out": str(tmp_path)})]
    options = ["--max-restarts", "2"]
    with Job(tmp_path / "job", num_servers=1, num_workers=2, command=command, options=options) as job:
        status = job.wait(60.0)
        output = job.out + job.err
        print(output[-4000:])
        assert status == 0
    refused = store == "dist_sync" and len(order) > 1
    assert ("cannot join a running job that steps two Trainers" in output) == refused
    assert (tmp_path / "1.json").exists() != refused
