"""What is measured about predictions: accuracy, top-k accuracy and losses, under MXNet's names.

A batch becomes one small vector of sums with the number of samples last, on the device and without asking it for a
value. So a step that measures can be compiled or captured as a graph, vectors of batches, devices and workers are added
as they are, and only `means` waits for the device. Sums are float32, where a count is exact up to 16 million samples:
add longer stretches in float64.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from echelon.errors import UsageError
from echelon.train.recipe.ranges import check_top_k

log = logging.getLogger(__name__)

_LOSSES = {"ce": "cross-entropy", "nll_loss": "nll-loss", "nll": "nll-loss"}
_EPSILON = 1e-12  # MXNet adds it to a probability before the logarithm: a hopeless sample costs 27.6, not infinity


class Metrics:
    """The metrics of `--top-k K` and `--loss ce,nll_loss`; accuracy is always there."""

    def __init__(self, top_k: int = 0, losses: str = "") -> None:
        check_top_k(top_k)
        self._top_k = top_k
        self._losses = _loss_names(losses)
        top = (f"top_k_accuracy_{top_k}",) if top_k else ()
        self.names: tuple[str, ...] = ("accuracy", *top, *self._losses)

    def with_cross_entropy(self) -> Metrics:
        """These and the cross-entropy, which curves are drawn of."""
        words = [word for word, name in _LOSSES.items() if name in self._losses]
        return Metrics(self._top_k, ",".join(["ce", *words]))

    def measure(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Sums over the batch, one for each of `names`, then the number of samples: float32, on the logits' device.

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
        """Values by name from one batch's sums or from many added up. Waits for the device. No samples: nan."""
        if sums.shape != (len(self.names) + 1,):
            raise UsageError(
                f"sums of shape {tuple(sums.shape)} for {len(self.names)} metrics ({', '.join(self.names)}) "
                "and the number of samples; pass what measure() of the same Metrics gave"
            )
        *totals, count = sums.tolist()
        return {name: total / count if count else float("nan") for name, total in zip(self.names, totals, strict=True)}


def _loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """MXNet's cross-entropy and its nll-loss: with one right class they are the same number."""
    right = logits.softmax(1).gather(1, labels[:, None])
    return -(right + _EPSILON).log().sum()


def _loss_names(losses: str) -> tuple[str, ...]:
    """The names for a comma list of words, each once."""
    found: dict[str, None] = {}
    for word in (part.strip() for part in losses.split(",")):
        if word in _LOSSES:
            found[_LOSSES[word]] = None
        elif word:
            log.warning("--loss: there is no loss %r, it is left out; use %s", word, ", ".join(_LOSSES))
    return tuple(found)
