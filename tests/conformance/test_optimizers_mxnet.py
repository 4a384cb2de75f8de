"""Compares the optimizers of echelon.optim with MXNet 1.9.1: one weight, ten updates, in float32.

Needs MXNet's Python: .peers/mxnet, or the one that ECHELON_MXNET_PYTHON names.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from echelon.optim import DCASGD, FTML, LAMB, LARS, LBSGD, SGLD, Accumulate, Ftrl, Rule, Signum

pytestmark = pytest.mark.peer

HERE = Path(__file__).parent
PYTHON = Path(os.environ.get("ECHELON_MXNET_PYTHON") or HERE.parents[1] / ".peers/mxnet/bin/python")
TOLERANCE = 2e-5  # relative and absolute; the operations are the same, but MXNet's kernels round at other places
BATCH = 8
STEPS = 10
LENGTH = 37

Settings = dict[str, Any]
# dcasgd with momentum is missing: MXNet 1.9.1 fails at `if mom:` for any weight of more than one element.
CASES: dict[str, tuple[str, Settings, type[Rule], Settings]] = {
    "signum": ("signum", {"learning_rate": 0.01, "wd": 0.1}, Signum, {"lr": 0.01, "weight_decay": 0.1}),
    "signum-lh": ("signum", {"learning_rate": 0.01, "wd_lh": 0.3}, Signum, {"lr": 0.01, "wd_lh": 0.3}),
    "signsgd": (
        "signum",
        {"learning_rate": 0.01, "momentum": 0.0, "wd": 0.1},
        Signum,
        {"lr": 0.01, "momentum": 0, "weight_decay": 0.1},
    ),
    "ftml": ("ftml", {"learning_rate": 0.01, "wd": 0.1}, FTML, {"lr": 0.01, "weight_decay": 0.1}),
    "ftrl": ("ftrl", {"learning_rate": 0.1, "wd": 0.1}, Ftrl, {"lr": 0.1, "weight_decay": 0.1}),
    "ftrl-zeros": ("ftrl", {"learning_rate": 0.1, "lamda1": 0.5}, Ftrl, {"lr": 0.1, "lamda1": 0.5}),
    "dcasgd": ("dcasgd", {"learning_rate": 0.1, "wd": 0.1}, DCASGD, {"lr": 0.1, "weight_decay": 0.1}),
    "test": ("test", {}, Accumulate, {}),
    "lars": ("lars", {"learning_rate": 5.0, "wd": 0.1}, LARS, {"lr": 5.0, "weight_decay": 0.1}),
    "lars-momentum": ("lars", {"learning_rate": 5.0, "momentum": 0.9}, LARS, {"lr": 5.0, "momentum": 0.9}),
    "lamb": ("lamb", {"learning_rate": 0.01, "wd": 0.1}, LAMB, {"lr": 0.01, "weight_decay": 0.1}),
    "lbsgd": (
        "lbsgd",
        {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.1, "warmup_strategy": "lars"},
        LBSGD,
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "batch_size": BATCH},
    ),
}


def mxnet(requests: list[Settings]) -> list[torch.Tensor]:
    if not PYTHON.exists():
        pytest.skip(f"no MXNet interpreter {PYTHON}")
    done = subprocess.run(
        [PYTHON, "-W", "ignore", HERE / "optimizers_mxnet_side.py"],
        input=json.dumps(requests),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return [torch.tensor(found) for found in json.loads(done.stdout.splitlines()[-1])]


def ours(kind: Any, settings: Settings, weights: torch.Tensor, gradients: torch.Tensor) -> torch.Tensor:
    parameter = nn.Parameter(weights.clone())
    optimizer = kind([parameter], **settings)
    found = []
    for gradient in gradients:
        parameter.grad = gradient / BATCH
        optimizer.step()
        found.append(parameter.detach().clone())
    return torch.stack(found)


def test_the_weights_match_mxnet() -> None:
    """MXNet gets the sum over a batch and divides by the batch size, as in its scripts; Echelon gets the mean."""
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(LENGTH, generator=generator)
    gradients = torch.randn(STEPS, LENGTH, generator=generator) * BATCH
    requests = [
        {
            "name": name,
            "settings": {"rescale_grad": 1 / BATCH, **settings},
            "weights": weights.tolist(),
            "gradients": gradients.tolist(),
        }
        for name, settings, _, _ in CASES.values()
    ]
    for case, theirs in zip(CASES, mxnet(requests), strict=True):
        found = ours(*CASES[case][2:], weights, gradients)
        assert not torch.equal(found[-1], weights), case
        assert_close(case, found, theirs)


def assert_close(case: str, found: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(found, theirs, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda text: f"{case}: {text}")


def test_the_drift_and_noise_of_sgld_match_mxnet() -> None:
    """The random numbers differ, but mean and spread of 200,000 elements after one update agree within 1 %."""
    weights, gradient = torch.full((200_000,), 2.0), torch.full((1, 200_000), 3.0 * BATCH)
    settings = {"learning_rate": 0.04, "wd": 0.5, "rescale_grad": 1 / BATCH}
    request = {"name": "sgld", "settings": settings, "weights": weights.tolist(), "gradients": gradient.tolist()}
    (theirs,) = mxnet([request])
    found = ours(SGLD, {"lr": 0.04, "weight_decay": 0.5}, weights, gradient)
    assert float(found.mean()) == pytest.approx(float(theirs.mean()), rel=0.01)
    assert float(found.std()) == pytest.approx(float(theirs.std()), rel=0.01)
