"""Metrics of the predictions, with MXNet's names: the accuracy, and those that `--top-k`, `--loss` and `--metrics` add.

The metrics of a batch are one small vector of sums, with the number of samples as the last element. It is computed on
the device without reading a value on the host, so a step with metrics can be compiled or captured. The vectors of
batches, devices and workers are simply added, and `values` computes every metric from the total. So a metric that is
not a mean, such as F1, is that of all samples; MXNet's default is the mean of its values for the batches. Only `values`
waits for the device. The sums are float32, in which counts are exact up to 16 million samples; accumulate longer runs
in float64.

The predictions are the probabilities of the classes. As in MXNet, MAE, MSE and RMSE compare each of them with the
number of the correct class. The Pearson correlation compares them with 1 for the correct class and 0 for the others.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from echelon.errors import UsageError, unknown_name

log = logging.getLogger(__name__)

Sums: TypeAlias = tuple[Tensor, ...]

_EPSILON = 1e-12  # MXNet adds it to a probability before the logarithm, so that a loss is at most 27.6
_LEAST = 1e-10  # the least probability that MXNet's perplexity uses


def _mean(sums: Sequence[float], count: float) -> float:
    return sums[0] / count


@dataclass(frozen=True, slots=True)
class Metric:
    """How a metric is computed: its sums over a batch of logits and labels, and its value from those of all batches."""

    name: str
    sums: Callable[[Tensor, Tensor], Sums]
    value: Callable[[Sequence[float], float], float] = _mean
    num_sums: int = 1
    needs_two_classes: bool = False


class Metrics:
    """The accuracy, and the metrics that `--top-k K`, `--loss ce,nll_loss` and `--metrics f1,mcc` add."""

    def __init__(self, top_k: int = 0, losses: str = "", others: str = "") -> None:
        added = [*_losses(losses), *map(_find, _words(others))]
        found = [_TABLE["acc"], *([_top_k(top_k)] if top_k else []), *added]
        self._top_k = top_k
        self._added = ",".join(metric.name for metric in added)
        self._metrics = tuple({metric.name: metric for metric in found}.values())
        self.names = tuple(metric.name for metric in self._metrics)
        self.num_sums = sum(metric.num_sums for metric in self._metrics) + 1  # the last one is the number of samples

    def with_cross_entropy(self) -> Metrics:
        """Return these metrics with the cross-entropy added, which the curves need."""
        return Metrics(self._top_k, others=f"{self._added},ce")

    def check_classes(self, num_classes: int) -> None:
        """Raise UsageError if a metric is not defined for this number of classes."""
        binary = [metric.name for metric in self._metrics if metric.needs_two_classes]
        if binary and num_classes != 2:
            raise UsageError(
                f"{' and '.join(binary)}: only for two classes, as in MXNet, but there are {num_classes}; choose others"
            )

    def measure(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the sums over the batch, then the number of samples: float32, on the logits' device.

        `logits` are (samples, classes), `labels` int64 (samples,).
        """
        logits = logits.detach().float()
        sums = [one for metric in self._metrics for one in metric.sums(logits, labels)]
        sums.append(torch.full((), len(labels), device=logits.device))
        return torch.stack([one.float() for one in sums])

    def values(self, sums: Tensor) -> dict[str, float]:
        """Return the value of each metric from the sums of all batches; NaN without samples. Waits for the device."""
        *rest, count = sums.tolist()
        values: dict[str, float] = {}
        for metric in self._metrics:
            own, rest = rest[: metric.num_sums], rest[metric.num_sums :]
            values[metric.name] = metric.value(own, count) if count else math.nan
        return values


def _words(names: str) -> list[str]:
    return [word for part in names.split(",") if (word := part.strip())]


def _find(word: str) -> Metric:
    """Return the metric with one of MXNet's names, in upper or lower case, or with the name that is shown."""
    folded = word.lower()
    folded = _ALIASES.get(folded, folded)
    if folded not in _TABLE:
        raise unknown_name("metric", word, _TABLE, "--top-k K adds the top-k accuracy")
    return _TABLE[folded]


def _losses(words: str) -> list[Metric]:
    """Return the metrics of `--loss`; as in MXNet, an unknown one causes a warning."""
    known = ("ce", "nll_loss", "nll")
    unknown = [word for word in _words(words) if word not in known]
    for word in unknown:
        log.warning("--loss: unknown loss %r is ignored; choose from %s", word, ", ".join(known))
    return [_find(word) for word in _words(words) if word in known]


def _top_k(top_k: int) -> Metric:
    def sums(logits: Tensor, labels: Tensor) -> Sums:
        best = logits.topk(min(top_k, logits.shape[1])).indices
        return ((best == labels[:, None]).sum(),)

    return Metric(f"top_k_accuracy_{top_k}", sums)


def _num_correct(logits: Tensor, labels: Tensor) -> Sums:
    return ((logits.argmax(1) == labels).sum(),)


def _of_correct(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the probabilities of the correct classes, (samples, 1)."""
    return logits.softmax(1).gather(1, labels[:, None])


def _cross_entropy(logits: Tensor, labels: Tensor) -> Sums:
    """MXNet's cross-entropy, which equals its nll-loss because each sample has one correct class."""
    return (-(_of_correct(logits, labels) + _EPSILON).log().sum(),)


def _loss(logits: Tensor, labels: Tensor) -> Sums:
    """The loss that training minimises, without label smoothing and mixup."""
    return (functional.cross_entropy(logits, labels, reduction="sum"),)


def _log_probabilities(logits: Tensor, labels: Tensor) -> Sums:
    return (-_of_correct(logits, labels).clamp_min(_LEAST).log().sum(),)


def _absolute_errors(logits: Tensor, labels: Tensor) -> Sums:
    return ((labels[:, None] - logits.softmax(1)).abs().mean(1).sum(),)


def _squared_errors(logits: Tensor, labels: Tensor) -> Sums:
    return ((labels[:, None] - logits.softmax(1)).square().mean(1).sum(),)


def _counts(logits: Tensor, labels: Tensor) -> Sums:
    """Count true positives, false positives, false negatives and true negatives; class 1 is positive."""
    found, wanted = logits.argmax(1) == 1, labels == 1
    return (found & wanted).sum(), (found & ~wanted).sum(), (~found & wanted).sum(), (~found & ~wanted).sum()


def _f1(counts: Sequence[float], count: float) -> float:
    hits, false_positives, false_negatives, _ = counts
    return 2 * hits / (2 * hits + false_positives + false_negatives) if hits else 0.0


def _mcc(counts: Sequence[float], count: float) -> float:
    """Return Matthews' correlation coefficient. A factor of 0 in the denominator counts as 1, as in MXNet."""
    hits, false_positives, false_negatives, rejections = counts
    factors = (
        hits + false_positives,
        hits + false_negatives,
        rejections + false_positives,
        rejections + false_negatives,
    )
    product = math.prod(factor for factor in factors if factor)
    return (hits * rejections - false_positives * false_negatives) / math.sqrt(product)


def _correlation_sums(logits: Tensor, labels: Tensor) -> Sums:
    """Sum the products of deviations. The mean of the probabilities, and of the targets, is 1 / classes exactly."""
    probabilities, mean = logits.softmax(1), 1 / logits.shape[1]
    covariance = (probabilities.gather(1, labels[:, None]) - mean).sum()
    return covariance, (probabilities - mean).square().sum(), torch.full_like(covariance, len(labels) * (1 - mean))


def _correlation(sums: Sequence[float], count: float) -> float:
    covariance, of_probabilities, of_targets = sums
    product = of_probabilities * of_targets
    return covariance / math.sqrt(product) if product else math.nan


_TABLE = {  # `METRICS` lists the keys for the flags
    "acc": Metric("accuracy", _num_correct),
    "ce": Metric("cross-entropy", _cross_entropy),
    "nll_loss": Metric("nll-loss", _cross_entropy),
    "loss": Metric("loss", _loss),
    "perplexity": Metric("perplexity", _log_probabilities, lambda sums, count: math.exp(sums[0] / count)),
    "f1": Metric("f1", _counts, _f1, num_sums=4, needs_two_classes=True),
    "mcc": Metric("mcc", _counts, _mcc, num_sums=4, needs_two_classes=True),
    "pearsonr": Metric("pearsonr", _correlation_sums, _correlation, num_sums=3),
    "mae": Metric("mae", _absolute_errors),
    "mse": Metric("mse", _squared_errors),
    "rmse": Metric("rmse", _squared_errors, lambda sums, count: math.sqrt(sums[0] / count)),
}
_ALIASES = {
    "accuracy": "acc",
    "crossentropy": "ce",
    "cross-entropy": "ce",
    "nll": "nll_loss",
    "nll-loss": "nll_loss",
    "negativeloglikelihood": "nll_loss",
    "pearsoncorrelation": "pearsonr",
}
