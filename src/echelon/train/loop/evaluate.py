"""Measuring a model on validation data: every sample once, in float batches on the model's device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing

import torch
from torch import Tensor, nn

from echelon.data.images.config import AugmentConfig
from echelon.data.loading.order import Sampling
from echelon.data.loading.sources import Source
from echelon.data.sets.datasets import make_loader
from echelon.train.step.metrics import Metrics
from echelon.train.step.precision import Precision

BATCH = 500
KEPT_BYTES = 512 << 20  # a decoded set up to this size is kept; a bigger one is decoded at every evaluation


class Validation:
    """The validation data of a run."""

    def __init__(
        self,
        source: Source,
        augment: AugmentConfig,
        device: torch.device,
        threads: int = 4,
        skip_bad_records: bool = False,
    ) -> None:
        self._source = source
        self._augment = augment.for_validation()
        self._device = device
        self._threads = threads
        self._skip_bad_records = skip_bad_records
        self._kept: list[tuple[Tensor, Tensor]] | None = None

    def measure(self, model: nn.Module, metrics: Metrics, precision: Precision | None = None) -> dict[str, float]:
        """The metrics over all samples; the model is left in training mode."""
        total = torch.zeros(len(metrics.names) + 1, dtype=torch.float64, device=self._device)
        model.eval()
        with torch.no_grad():
            for images, labels in self._batches():
                total += metrics.measure(predict(model, images, precision), labels)
        model.train()
        return metrics.means(total)

    def _batches(self) -> Iterable[tuple[Tensor, Tensor]]:
        if self._kept is None:
            channels, height, width = self._augment.shape
            if len(self._source) * channels * height * width * 4 > KEPT_BYTES:
                return self._decode()
            self._kept = list(self._decode())
        return self._kept

    def _decode(self) -> Iterator[tuple[Tensor, Tensor]]:
        sampling = Sampling(len(self._source), BATCH, shuffle=False)
        loader = make_loader(
            self._source,
            self._augment,
            sampling,
            threads=self._threads,
            exact=True,
            skip_bad_records=self._skip_bad_records,
        )
        with closing(loader):
            for images, labels in loader:  # whose memory is used again
                yield images.to(self._device, copy=True), labels.to(self._device, copy=True)


def predict(model: nn.Module, images: Tensor, precision: Precision | None = None) -> Tensor:
    """The network's outputs in float32."""
    if precision is None:
        return model(images).float()  # type: ignore[no-any-return]
    with precision.autocast():
        return model(images).float()  # type: ignore[no-any-return]
