"""Metrics: MXNet's names and values, summed on the device without reading a value on the host."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch import Tensor

from echelon.train.step.metrics import Metrics

pytestmark = pytest.mark.numeric

LOGITS = torch.tensor([[3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0], [0.0, 3.0, 2.0, 1.0], [9.0, 1.0, 2.0, 3.0]])
LABELS = torch.tensor([0, 2, 2, 1])  # first, second, second, fourth choice


def test_accuracy_alone() -> None:
    metrics = Metrics()
    assert metrics.names == ("accuracy",)
    assert metrics.measure(LOGITS, LABELS).tolist() == [1.0, 4.0]
    assert metrics.means(metrics.measure(LOGITS, LABELS)) == {"accuracy": 0.25}


@pytest.mark.parametrize(("k", "correct"), [(2, 3), (3, 3), (4, 4), (5, 4)])  # 5: more than there are classes
def test_top_k(k: int, correct: int) -> None:
    metrics = Metrics(top_k=k)
    assert metrics.names == ("accuracy", f"top_k_accuracy_{k}")
    assert metrics.measure(LOGITS, LABELS).tolist() == [1.0, correct, 4.0]


def test_losses_are_the_mean_negative_logarithm_of_the_correct_probability() -> None:
    metrics = Metrics(losses="ce,nll_loss")
    rows = zip(LOGITS.tolist(), LABELS.tolist(), strict=True)
    probabilities = [math.exp(row[label]) / sum(map(math.exp, row)) for row, label in rows]
    expected = -sum(math.log(p + 1e-12) for p in probabilities) / 4
    means = metrics.means(metrics.measure(LOGITS, LABELS))
    assert list(means) == ["accuracy", "cross-entropy", "nll-loss"]
    assert means["cross-entropy"] == means["nll-loss"] == pytest.approx(expected, rel=1e-6)


def test_the_loss_of_one_sample_is_limited_as_in_mxnet() -> None:
    metrics = Metrics(losses="ce")
    means = metrics.means(metrics.measure(torch.tensor([[0.0, 1000.0]]), torch.tensor([0])))
    assert means["cross-entropy"] == pytest.approx(-math.log(1e-12))


def test_half_precision_logits_are_measured_in_float32() -> None:
    """In float16, the loss of 1000 equal probabilities would have a larger error."""
    metrics = Metrics(losses="ce")
    means = metrics.means(metrics.measure(torch.zeros(64, 1000, dtype=torch.float16), torch.arange(64)))
    assert means["cross-entropy"] == pytest.approx(math.log(1000), rel=1e-6)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("", ()),
        ("ce", ("cross-entropy",)),
        ("nll", ("nll-loss",)),
        ("nll_loss, ce", ("nll-loss", "cross-entropy")),
        ("nll,nll_loss", ("nll-loss",)),
    ],
)
def test_loss_words(words: str, names: tuple[str, ...], caplog: pytest.LogCaptureFixture) -> None:
    assert Metrics(losses=words).names == ("accuracy", *names)
    assert not caplog.records


def test_an_unknown_loss_is_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert Metrics(losses="hinge,ce").names == ("accuracy", "cross-entropy")
    assert caplog.messages == ["--loss: unknown loss 'hinge' is ignored; choose from ce, nll_loss, nll"]


def test_sums_of_batches_add_up() -> None:
    metrics = Metrics(top_k=3, losses="ce")
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(100, 7, generator=generator), torch.randint(7, (100,), generator=generator)
    parts = [metrics.measure(logits[at : at + 30], labels[at : at + 30]) for at in range(0, 100, 30)]
    together = metrics.means(torch.stack(parts).sum(0))
    assert together == pytest.approx(metrics.means(metrics.measure(logits, labels)), rel=1e-6)
    assert together["accuracy"] == pytest.approx(float((logits.argmax(1) == labels).float().mean()))


def test_without_samples_means_are_nan() -> None:
    metrics = Metrics(top_k=5)
    assert all(math.isnan(value) for value in metrics.means(torch.zeros(3)).values())


def test_no_value_is_read_on_the_host() -> None:
    """Tensors on the meta device have no values: reading one fails here, as it would while a graph is captured."""
    metrics = Metrics(top_k=2, losses="ce")
    logits = torch.empty(8, 10, device="meta", dtype=torch.bfloat16, requires_grad=True)
    sums = metrics.measure(logits, torch.empty(8, device="meta", dtype=torch.int64))
    assert (sums.shape, sums.dtype, sums.device.type, sums.requires_grad) == ((4,), torch.float32, "meta", False)


def test_compiles_as_one_graph() -> None:
    metrics = Metrics(top_k=2, losses="ce,nll")

    def measure(logits: Tensor, labels: Tensor) -> Tensor:
        return metrics.measure(logits, labels)

    compiled = torch.compile(measure, backend="eager", fullgraph=True)
    assert torch.equal(compiled(LOGITS, LABELS), metrics.measure(LOGITS, LABELS))
