"""Compares the metrics with MXNet 1.9.1 on the same predictions.

Needs MXNet's Python: .peers/mxnet, or the one that ECHELON_MXNET_PYTHON names.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from echelon.train.recipe.options import METRICS
from echelon.train.step.metrics import Metrics
from mxnet_peer import run_mxnet

pytestmark = pytest.mark.peer

TOLERANCE = 2e-6  # relative; both sum a hundred float32 numbers per batch, in different orders
SAMPLES = 101
BATCH = 25  # the last batch has one sample

# MXNet averages these over batches by default, and over samples with this setting.
OVER_SAMPLES = {"f1": {"average": "micro"}, "mcc": {"average": "micro"}, "pearsonr": {"average": "micro"}}
MEANS_OF_BATCHES = ("mae", "mse", "rmse")  # without such a setting: compared with one batch


def request(name: str, logits: Tensor, labels: Tensor) -> dict[str, Any]:
    """Ask for a metric of the probabilities; of the losses for `loss`, and with one-hot labels for `pearsonr`."""
    predictions = logits.softmax(1)
    size = len(labels) if name in MEANS_OF_BATCHES else BATCH
    if name == "loss":
        predictions = functional.cross_entropy(logits, labels, reduction="none")
    targets = functional.one_hot(labels, logits.shape[1]) if name == "pearsonr" else labels
    parts = zip(targets.split(size), predictions.split(size), strict=True)
    settings = {"ignore_label": None} if name == "perplexity" else OVER_SAMPLES.get(name, {})
    return {"name": name, "settings": settings, "batches": [(a.tolist(), b.tolist()) for a, b in parts]}


@pytest.mark.parametrize("num_classes", [2, 5])
def test_values_are_those_of_mxnet(num_classes: int) -> None:
    generator = torch.Generator().manual_seed(num_classes)
    labels = torch.randint(num_classes, (SAMPLES,), generator=generator)
    logits = torch.randn(SAMPLES, num_classes, generator=generator) * 3
    logits[torch.arange(SAMPLES), labels] += 1  # better than chance
    names = [name for name in METRICS if num_classes == 2 or name not in ("f1", "mcc")]
    metrics = Metrics(others=",".join(names))
    sums = sum(metrics.measure(*part) for part in zip(logits.split(BATCH), labels.split(BATCH), strict=True))
    assert isinstance(sums, Tensor)
    expected = dict(run_mxnet("metrics_mxnet_side.py", [request(name, logits, labels) for name in names]))
    assert metrics.values(sums) == pytest.approx(expected, rel=TOLERANCE)
    assert list(expected) == list(metrics.names)
