"""Measures a model on validation data: every sample once, in float batches on the model's device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing, nullcontext

import torch
from torch import Tensor, nn

from echelon.data.images.config import AugmentConfig
from echelon.data.loading.order import Sampling
from echelon.data.loading.sources import Source
from echelon.data.sets.datasets import make_loader
from echelon.train.recipe.options import TrainOptions
from echelon.train.step.average import MovingAverage
from echelon.train.step.metrics import Metrics
from echelon.train.step.precision import Precision

BATCH = 500
KEPT_BYTES = 512 << 20  # a decoded set up to this size is kept; a larger one is decoded for every evaluation


class Validation:
    """Measures a model on the validation data of a run, with the moving average of its weights if there is one."""

    def __init__(
        self,
        source: Source,
        augment: AugmentConfig,
        options: TrainOptions,
        metrics: Metrics,
        precision: Precision,
        average: MovingAverage | None = None,
    ) -> None:
        self._source = source
        self._augment = augment.for_validation()
        self._options = options
        self._metrics = metrics
        self._precision = precision
        self._average = average
        self._kept: list[tuple[Tensor, Tensor]] | None = None

    def measure(self, model: nn.Module) -> dict[str, float]:
        """Return the metrics over all samples; leaves the model in training mode."""
        device = self._precision.device
        total = torch.zeros(len(self._metrics.names) + 1, dtype=torch.float64, device=device)
        model.eval()
        with self._average.applied() if self._average is not None else nullcontext(), torch.no_grad():
            for images, labels in self._batches():
                total += self._metrics.measure(predict(model, images, self._precision), labels)
        model.train()
        return self._metrics.means(total)

    def _batches(self) -> Iterable[tuple[Tensor, Tensor]]:
        if self._kept is None:
            channels, height, width = self._augment.shape
            if len(self._source) * channels * height * width * 4 > KEPT_BYTES:
                return self._decode()
            self._kept = list(self._decode())
        return self._kept

    def _decode(self) -> Iterator[tuple[Tensor, Tensor]]:
        device = self._precision.device
        loader = make_loader(
            self._source,
            self._augment,
            Sampling(len(self._source), BATCH, shuffle=False),
            threads=self._options.data_nthreads,
            exact=True,
            skip_bad_records=self._options.skip_bad_records,
        )
        with closing(loader):
            for images, labels in loader:  # the loader reuses the memory of its batches
                yield images.to(device, copy=True), labels.to(device, copy=True)


def predict(model: nn.Module, images: Tensor, precision: Precision | None = None) -> Tensor:
    """Return the network's outputs in float32."""
    if precision is None:
        return model(images).float()  # type: ignore[no-any-return]
    with precision.autocast():
        return model(images).float()  # type: ignore[no-any-return]
