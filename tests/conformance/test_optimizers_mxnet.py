"""Compares the optimizers of echelon.optim, and the recorded weights of the unit tests, with a live MXNet 1.9.1.

Needs MXNet's Python: .peers/mxnet, or the one that ECHELON_MXNET_PYTHON names. To record the weights again, run this
file with ECHELON_RECORD=1.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch
from torch import nn

from echelon.optim import SGLD, create
from mxnet_optimizers import (
    BATCH,
    CASES,
    RATES,
    RECORDED,
    RECORDED_UPDATES,
    assert_close,
    inputs,
    recorded,
    settings_of,
)
from mxnet_peer import run_mxnet

pytestmark = pytest.mark.peer


def mxnet(requests: list[dict[str, Any]]) -> list[torch.Tensor]:
    return [torch.tensor(found) for found in run_mxnet("optimizers_mxnet_side.py", requests)]


def rounded(weights: torch.Tensor) -> Any:
    chosen = weights[[*RECORDED_UPDATES]]
    return (
        torch.tensor([float(f"{value:.7g}") for value in chosen.flatten()], dtype=torch.float64)
        .view_as(chosen)
        .tolist()
    )


def test_the_weights_match_mxnet() -> None:
    weights, gradients = inputs()
    requests = []
    for case in CASES:
        name, settings = settings_of(case)
        data = {"weights": weights.tolist(), "gradients": gradients.tolist(), "rates": RATES}
        requests.append({"name": name, "settings": settings, **data})
    live = dict(zip(CASES, mxnet(requests), strict=True))
    if os.environ.get("ECHELON_RECORD"):
        lines = [f"{json.dumps(case)}: {json.dumps(rounded(found))}" for case, found in live.items()]
        RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    for case, theirs in recorded().items():
        assert_close(case, theirs, live[case][[*RECORDED_UPDATES]])
    for case, theirs in live.items():
        name, settings = settings_of(case)
        parameter = nn.Parameter(weights.clone())
        optimizer = create(name, [parameter], **settings)
        for gradient, rate, wanted in zip(gradients, RATES, theirs, strict=True):
            optimizer.param_groups[0]["lr"] = rate
            parameter.grad = gradient.clone()
            optimizer.step()
            assert_close(case, parameter.detach(), wanted)
        assert not torch.equal(parameter.detach(), weights), case


def test_the_drift_and_noise_of_sgld_match_mxnet() -> None:
    """The random numbers differ, but mean and spread of 200,000 elements after one update agree within 1 %."""
    weights, gradient = torch.full((200_000,), 2.0), torch.full((200_000,), 3.0 * BATCH)
    settings = {"learning_rate": 0.04, "wd": 0.5, "rescale_grad": 1 / BATCH, "clip_gradient": 2.5}
    data = {"weights": weights.tolist(), "gradients": [gradient.tolist()], "rates": [0.04]}
    (theirs,) = mxnet([{"name": "sgld", "settings": settings, **data}])
    parameter = nn.Parameter(weights)
    parameter.grad = gradient
    optimizer = SGLD([parameter], lr=0.04, weight_decay=0.5, rescale_grad=1 / BATCH, clip_gradient=2.5)
    optimizer.step()
    assert float(parameter.detach().mean()) == pytest.approx(float(theirs.mean()), rel=0.01)
    assert float(parameter.detach().std()) == pytest.approx(float(theirs.std()), rel=0.01)
