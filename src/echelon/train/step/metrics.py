"""Metrics of the predictions: accuracy, top-k accuracy and losses, with MXNet's names.

The metrics of a batch are one small vector of sums, with the number of samples as the last element. It is computed on
the device without reading a value on the host, so a step with metrics can be compiled or captured. The vectors of
batches, devices and workers are simply added; only `means` waits for the device. The sums are float32, in which counts
are exact up to 16 million samples; accumulate longer runs in float64.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

log = logging.getLogger(__name__)

_LOSSES = {"ce": "cross-entropy", "nll_loss": "nll-loss", "nll": "nll-loss"}
_EPSILON = 1e-12  # MXNet adds it to a probability before the logarithm, so that a loss is at most 27.6


class Metrics:
    """The accuracy, and the metrics that `--top-k K` and `--loss ce,nll_loss` add."""

    def __init__(self, top_k: int = 0, losses: str = "") -> None:
        self._top_k = top_k
        self._losses = _loss_names(losses)
        top = (f"top_k_accuracy_{top_k}",) if top_k else ()
        self.names: tuple[str, ...] = ("accuracy", *top, *self._losses)

    def with_cross_entropy(self) -> Metrics:
        """Return these metrics with the cross-entropy added, which the validation curves need."""
        words = [word for word, name in _LOSSES.items() if name in self._losses]
        return Metrics(self._top_k, ",".join(["ce", *words]))

    def measure(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the sums over the batch, one per name, then the number of samples: float32, on the logits' device.

        `logits` are (samples, classes), `labels` int64 (samples,).
        """
        logits = logits.detach().float()
        sums = [(logits.argmax(1) == labels).sum()]
        if self._top_k:
            best = logits.topk(min(self._top_k, logits.shape[1])).indices
            sums.append((best == labels[:, None]).sum())
        if self._losses:
            sums += [_loss_sum(logits, labels)] * len(self._losses)
        sums.append(torch.full((), len(labels), device=logits.device))
        return torch.stack([one.float() for one in sums])

    def means(self, sums: Tensor) -> dict[str, float]:
        """Return the mean of each metric from the sums of all batches; NaN without samples. Waits for the device."""
        *totals, count = sums.tolist()
        return {name: total / count if count else float("nan") for name, total in zip(self.names, totals, strict=True)}


def _loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of MXNet's cross-entropy, which equals its nll-loss because each sample has one correct class."""
    correct = logits.softmax(1).gather(1, labels[:, None])
    return -(correct + _EPSILON).log().sum()


def _loss_names(losses: str) -> tuple[str, ...]:
    """Return the metric names for a comma-separated list of words, without duplicates."""
    found: dict[str, None] = {}
    for word in (part.strip() for part in losses.split(",")):
        if word in _LOSSES:
            found[_LOSSES[word]] = None
        elif word:
            log.warning("--loss: unknown loss %r is ignored; choose from %s", word, ", ".join(_LOSSES))
    return tuple(found)
