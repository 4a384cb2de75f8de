"""Metrics: MXNet's names and values, summed on the device without reading a value on the host."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch import Tensor

from echelon.errors import UsageError
from echelon.train.recipe.options import METRICS
from echelon.train.step import metrics as module
from echelon.train.step.metrics import Metrics

pytestmark = pytest.mark.numeric

LOGITS = torch.tensor([[3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0], [0.0, 3.0, 2.0, 1.0], [9.0, 1.0, 2.0, 3.0]])
LABELS = torch.tensor([0, 2, 2, 1])  # first, second, second, fourth choice


def test_accuracy_alone() -> None:
    metrics = Metrics()
    assert metrics.names == ("accuracy",)
    assert metrics.measure(LOGITS, LABELS).tolist() == [1.0, 4.0]
    assert metrics.values(metrics.measure(LOGITS, LABELS)) == {"accuracy": 0.25}


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
    means = metrics.values(metrics.measure(LOGITS, LABELS))
    assert list(means) == ["accuracy", "cross-entropy", "nll-loss"]
    assert means["cross-entropy"] == means["nll-loss"] == pytest.approx(expected, rel=1e-6)


def test_the_loss_of_one_sample_is_limited_as_in_mxnet() -> None:
    metrics = Metrics(losses="ce")
    means = metrics.values(metrics.measure(torch.tensor([[0.0, 1000.0]]), torch.tensor([0])))
    assert means["cross-entropy"] == pytest.approx(-math.log(1e-12))


def test_half_precision_logits_are_measured_in_float32() -> None:
    """In float16, the loss of 1000 equal probabilities would have a larger error."""
    metrics = Metrics(losses="ce")
    means = metrics.values(metrics.measure(torch.zeros(64, 1000, dtype=torch.float16), torch.arange(64)))
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
    metrics = Metrics(top_k=3, losses="ce", others=",".join(METRICS))
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(100, 7, generator=generator), torch.randint(7, (100,), generator=generator)
    parts = [metrics.measure(logits[at : at + 30], labels[at : at + 30]) for at in range(0, 100, 30)]
    together = metrics.values(torch.stack(parts).sum(0))
    assert together == pytest.approx(metrics.values(metrics.measure(logits, labels)), rel=1e-6)
    assert together["accuracy"] == pytest.approx(float((logits.argmax(1) == labels).float().mean()))


def test_without_samples_means_are_nan() -> None:
    metrics = Metrics(top_k=5, others=",".join(METRICS))
    assert all(math.isnan(value) for value in metrics.values(torch.zeros(metrics.num_sums)).values())


def test_no_value_is_read_on_the_host() -> None:
    """Tensors on the meta device have no values: reading one fails here, as it would while a graph is captured."""
    metrics = Metrics(top_k=2, losses="ce", others=",".join(METRICS))
    logits = torch.empty(8, 10, device="meta", dtype=torch.bfloat16, requires_grad=True)
    sums = metrics.measure(logits, torch.empty(8, device="meta", dtype=torch.int64))
    expected = ((metrics.num_sums,), torch.float32, "meta", False)
    assert (sums.shape, sums.dtype, sums.device.type, sums.requires_grad) == expected


def test_compiles_as_one_graph() -> None:
    metrics = Metrics(top_k=2, losses="ce,nll", others=",".join(METRICS))

    def measure(logits: Tensor, labels: Tensor) -> Tensor:
        return metrics.measure(logits, labels)

    compiled = torch.compile(measure, backend="eager", fullgraph=True)
    assert torch.equal(compiled(LOGITS, LABELS), metrics.measure(LOGITS, LABELS))


# Probabilities and labels of the examples in MXNet's documentation of its metrics, and the values given there.
MXNET_LOGITS = torch.tensor([[0.3, 0.7], [0.0, 1.0], [0.4, 0.6]]).log()
MXNET_LABELS = torch.tensor([0, 1, 1])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("acc", 2 / 3),
        ("f1", 0.8),
        ("mcc", 0.0),  # the network always predicts class 1
        ("perplexity", 1.7710976285155853),
        ("ce", 0.57159948348999023),
        ("nll_loss", 0.57159948348999023),
        ("loss", -(math.log(0.3) + math.log(0.6)) / 3),
        ("pearsonr", 0.42163704544016178),
        ("mae", (0.3 + 0.7 + 1.0 + 0.0 + 0.6 + 0.4) / 6),  # the number of the class minus each probability
        ("mse", (0.09 + 0.49 + 1.0 + 0.0 + 0.36 + 0.16) / 6),
        ("rmse", math.sqrt(0.35)),
    ],
)
def test_known_values(name: str, value: float) -> None:
    metrics = Metrics(others=name)
    values = metrics.values(metrics.measure(MXNET_LOGITS, MXNET_LABELS))
    assert list(values.values())[-1] == pytest.approx(value, rel=1e-6, abs=1e-7)


def test_f1_and_mcc_are_those_of_all_batches_and_not_a_mean_of_theirs() -> None:
    """The counts are those in MXNet's documentation of MCC; half of the batches have no true negative."""
    counts = {(1, 1): 10000, (1, 0): 1000, (0, 1): 1, (0, 0): 1}  # by (prediction, label)
    predictions = torch.tensor([prediction for (prediction, _), count in counts.items() for _ in range(count)])
    labels = torch.tensor([label for (_, label), count in counts.items() for _ in range(count)])
    logits = torch.nn.functional.one_hot(predictions, 2).float()
    metrics = Metrics(others="f1,mcc")
    parts = zip(logits.split(600), labels.split(600), strict=True)
    values = metrics.values(torch.stack([metrics.measure(*part) for part in parts]).sum(0))
    assert values == pytest.approx({"accuracy": 10001 / 11002, "f1": 0.95233560306652054, "mcc": 0.01917751877733392})


@pytest.mark.parametrize(("prediction", "label", "f1"), [(0, 0, 0.0), (1, 1, 1.0), (0, 1, 0.0), (1, 0, 0.0)])
def test_f1_and_mcc_of_one_class_only(prediction: int, label: int, f1: float) -> None:
    metrics = Metrics(others="f1,mcc")
    logits = torch.nn.functional.one_hot(torch.full((3,), prediction), 2).float()
    values = metrics.values(metrics.measure(logits, torch.full((3,), label)))
    assert (values["f1"], values["mcc"]) == (f1, 0.0)


def test_names_are_mxnets_in_any_case_and_each_is_shown_once() -> None:
    words = "CrossEntropy,NegativeLogLikelihood, PearsonCorrelation,RMSE,accuracy,ce,nll-loss"
    assert Metrics(losses="ce", others=words).names == ("accuracy", "cross-entropy", "nll-loss", "pearsonr", "rmse")
    assert Metrics(2, "nll", "f1").with_cross_entropy().names == (
        "accuracy", "top_k_accuracy_2", "nll-loss", "f1", "cross-entropy",
    )  # fmt: skip
    assert tuple(module._TABLE) == METRICS, "the flags list every metric"


def test_unknown_and_unsuitable_metrics_are_rejected() -> None:
    with pytest.raises(UsageError, match=r"unknown metric 'fi'; did you mean 'f1'\? Choose one of acc, .*--top-k"):
        Metrics(others="fi")
    metrics = Metrics(others="f1,mse,mcc")
    metrics.check_classes(2)
    with pytest.raises(UsageError, match="f1 and mcc: only for two classes, as in MXNet, but there are 10"):
        metrics.check_classes(10)


def test_the_correlation_of_equal_probabilities_is_not_defined() -> None:
    metrics = Metrics(others="pearsonr")
    assert math.isnan(metrics.values(metrics.measure(torch.zeros(4, 2), torch.tensor([0, 1, 0, 0])))["pearsonr"])
