"""The real peers of `echelon bench pushpull` on small shapes: they start, step together and end."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from echelon.bench.harness.turns import Contender
from echelon.bench.pushpull.contenders import PushPullPlan, gloo, mxnet, mxnet_tuned
from echelon.bench.pushpull.run import compare


@pytest.fixture
def plan(tmp_path: Path) -> PushPullPlan:
    """Return a plan with the shapes of a small network. A fixture checks after every test that no process is left."""
    return PushPullPlan(model="mlp", work_dir=tmp_path)


def settings(path: Path) -> Namespace:
    job = {"num_workers": 2, "num_servers": 2, "kv_store": "dist_sync", "transport": "auto", "security": "auto"}
    return Namespace(model="mlp", **job, hosts=None, rounds=2, steps=3, warmup=1, json=path)


@pytest.mark.long
def test_gloo_steps_and_its_result_is_written(plan: PushPullPlan, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    compare([gloo(plan)], settings(path))
    body = json.loads(path.read_text())
    (case,) = body["cases"]
    assert (case["name"], case["samples"], [len(one) for one in case["rounds"]]) == ("gloo", 6, [3, 3])
    assert 0 < case["p10_ms"] <= case["median_ms"] <= case["p90_ms"]


@pytest.mark.peer
@pytest.mark.parametrize("make", [mxnet, mxnet_tuned])
@pytest.mark.parametrize(("store", "transport"), [("dist_sync", "auto"), ("dist_async", "tcp")])
def test_mxnet_steps_and_ends(
    plan: PushPullPlan, make: Callable[[PushPullPlan], Contender], store: str, transport: str
) -> None:
    with make(replace(plan, kv_store=store, transport=transport)) as contender:
        times = contender.run_round(3)
    assert len(times) == 3
    assert all(0 < step_s < 10 for step_s in times)
