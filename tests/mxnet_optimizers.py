"""Ten updates of one weight under MXNet 1.9.1, by optimizer: the settings, the inputs and the recorded weights.

The learning rate drops twice, and weight decay, `clip_gradient` and `rescale_grad` are set, so that every place where
two formulas can differ has an effect. `conformance/test_optimizers_mxnet.py` checks the recorded weights against a live
MXNet; the unit tests need none.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Settings = dict[str, Any]

RECORDED = Path(__file__).with_name("mxnet_optimizers.json")
TOLERANCE = 2e-5  # relative and absolute; the operations are the same, but MXNet's kernels round at other places
SHAPE = (3, 4)
RECORDED_UPDATES = (3, 9)  # the first one after a drop of the rate, and the last
RATES = (0.1, 0.1, 0.1, 0.02, 0.02, 0.02, 0.02, 0.004, 0.004, 0.004)
BATCH = 8
COMMON: Settings = {"rescale_grad": 1 / BATCH, "clip_gradient": 0.7, "wd": 0.1}
LARGE_BATCH: Settings = {"momentum": 0.9, "batch_scale": 3, "warmup_epochs": 2, "updates_per_epoch": 4}

# dcasgd with momentum is missing: MXNet 1.9.1 fails at `if mom:` for any weight of more than one element.
CASES: dict[str, tuple[str, Settings]] = {
    "sgd": ("sgd", {}),
    "sgd-momentum": ("sgd", {"momentum": 0.9}),
    "ccsgd": ("ccsgd", {"momentum": 0.5, "clip_gradient": None}),
    "nag": ("nag", {}),
    "nag-momentum": ("nag", {"momentum": 0.9}),
    "adam": ("adam", {}),
    "adam-epsilon": ("adam", {"beta1": 0.8, "beta2": 0.99, "epsilon": 0.1}),
    "adagrad": ("adagrad", {}),
    "adagrad-eps": ("adagrad", {"eps": 0.1, "wd": 0.0}),
    "groupadagrad": ("groupadagrad", {"wd": 0.0}),
    "rmsprop": ("rmsprop", {}),
    "rmsprop-epsilon": ("rmsprop", {"gamma1": 0.5, "epsilon": 0.1}),
    "rmsprop-centered": ("rmsprop", {"centered": True, "gamma2": 0.8, "clip_weights": 0.9}),
    "adadelta": ("adadelta", {}),
    "adadelta-epsilon": ("adadelta", {"rho": 0.5, "epsilon": 0.1}),
    "adamax": ("adamax", {}),
    "nadam": ("nadam", {}),
    "nadam-decay": ("nadam", {"schedule_decay": 0.5, "epsilon": 0.1}),
    "signum": ("signum", {"wd_lh": 0.3}),
    "signsgd": ("signum", {"momentum": 0.0}),
    "ftml": ("ftml", {}),
    "ftrl": ("ftrl", {}),
    "ftrl-zeros": ("ftrl", {"lamda1": 0.5}),
    "dcasgd": ("dcasgd", {"lamda": 0.5}),
    "lars": ("lars", {"momentum": 0.9, "eta": 0.5}),
    "lars-plain": ("lars", {"eta": 0.5, "eps": 0.1}),
    "lamb": ("lamb", {}),
    "test": ("test", {}),
    "lbsgd": ("lbsgd", LARGE_BATCH),
    "lbsgd-power2": ("lbsgd", LARGE_BATCH | {"warmup_strategy": "power2"}),
    "lbsgd-sqrt": ("lbsgd", LARGE_BATCH | {"warmup_strategy": "sqrt"}),
    "lbsgd-constant": ("lbsgd", LARGE_BATCH | {"warmup_strategy": "constant"}),
    "lbsgd-lars": ("lbsgd", LARGE_BATCH | {"warmup_strategy": "lars"}),
    "lbsgd-one-batch": ("lbsgd", LARGE_BATCH | {"batch_scale": 1}),
}


def settings_of(case: str) -> tuple[str, Settings]:
    """Return MXNet's name and settings of a case."""
    name, settings = CASES[case]
    return name, {"learning_rate": RATES[0], **COMMON, **settings}


def inputs() -> tuple[Tensor, Tensor]:
    """Return the first weights and the gradients, which are sums over a batch, as MXNet's loss layers give them."""
    numbers = torch.arange(11 * 12, dtype=torch.float64).mul(1.7).sin().mul(1.9).float().view(11, *SHAPE)
    return numbers[0], numbers[1:] * BATCH


def recorded() -> dict[str, Tensor]:
    """Return the weights after each of `RECORDED_UPDATES`, which count from 0, by case."""
    return {case: torch.tensor(weights) for case, weights in json.loads(RECORDED.read_text()).items()}


def assert_close(case: str, found: Tensor, theirs: Tensor) -> None:
    """Raise AssertionError if weights differ by more than rounding."""
    torch.testing.assert_close(found, theirs, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda text: f"{case}: {text}")
