"""The real contenders of `echelon bench train` on small batches: they step together, learn and end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from echelon.bench.train.contenders import TrainPlan, ddp, echelon, mxnet


@pytest.fixture
def plan(tmp_path: Path) -> TrainPlan:
    """Return a small plan. A fixture checks after every test that no process is left."""
    return TrainPlan(model="resnet20", batch_size=8, threads=1, work_dir=tmp_path)


@pytest.mark.long
def test_echelon_and_ddp_do_the_same_training(plan: TrainPlan) -> None:
    with echelon(plan) as first, ddp(plan) as second:
        times = [first.run_round(6), second.run_round(6)]
    assert [len(one) for one in times] == [6, 6]
    assert first.losses == pytest.approx(second.losses, rel=1e-3)
    assert first.losses[-1] < first.losses[0]


@pytest.mark.peer
@pytest.mark.parametrize("model", ["resnet20", "mlp25m"])
@pytest.mark.parametrize("store", ["dist_sync", "dist_async"])
def test_mxnet_learns_and_ends(plan: TrainPlan, model: str, store: str) -> None:
    with mxnet(replace(plan, model=model, kv_store=store)) as contender:
        assert len(contender.run_round(8)) == 8
    assert contender.losses[-1] < contender.losses[0]
