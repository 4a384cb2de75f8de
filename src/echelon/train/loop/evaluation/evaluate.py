"""Measures a model on validation data: every sample once, in float batches on the model's device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from typing import TypeAlias

import torch
from torch import Tensor, nn

from echelon.data.images.config import AugmentConfig
from echelon.data.loading.loader import Batches
from echelon.data.loading.order import RandomPart, Sampling
from echelon.data.loading.sources import Source
from echelon.data.sets.datasets import make_loader
from echelon.train.loop.stopping import StopSignals
from echelon.train.recipe.options import TrainOptions
from echelon.train.step.average import MovingAverage
from echelon.train.step.metrics import Metrics
from echelon.train.step.precision import Precision

Batch: TypeAlias = tuple[Tensor, Tensor]
OnProgress: TypeAlias = Callable[[int, int], None]  # gets the samples that are done, and all samples

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
        self._num_samples = min(options.num_val_examples or len(source), len(source))
        self._kept: list[Batch] | None = None

    def measure(self, model: nn.Module, stop: StopSignals, on_progress: OnProgress) -> dict[str, float]:
        """Return the metrics over all samples; leaves the model in training mode.

        A signal raises Interrupted at once, even in the middle of a batch, because a batch may take minutes. The model
        then has its own weights again, not their average.
        """
        model.eval()
        try:
            with self._average.applied() if self._average is not None else nullcontext(), torch.no_grad():
                sums = self._sums(model, stop, on_progress)
        finally:
            model.train()
        return self._metrics.values(sums)

    def _sums(self, model: nn.Module, stop: StopSignals, on_progress: OnProgress) -> Tensor:
        """Return the sums of the metrics. Only loading and the forward pass are left at once if a signal arrives."""
        done, device = 0, self._precision.device
        total = torch.zeros(self._metrics.num_sums, dtype=torch.float64, device=device)
        on_progress(done, self._num_samples)
        with stop.instead_of_errors(), self._opened() as batches:
            while True:
                with stop.at_once():
                    batch = next(batches, None)
                    if batch is None:
                        return total
                    images, labels = batch
                    total += self._metrics.measure(predict(model, images, self._precision), labels)
                done += len(labels)
                on_progress(done, self._num_samples)

    @contextmanager
    def _opened(self) -> Iterator[Iterator[Batch]]:
        """Open the data for one evaluation."""
        if self._kept is not None:
            yield iter(self._kept)
            return
        loader = make_loader(
            self._source,
            self._augment,
            Sampling(len(self._source), BATCH, shuffle=False, sharding=RandomPart(self._num_samples)),
            threads=self._options.data_nthreads,
            exact=True,
            skip_bad_records=self._options.skip_bad_records,
        )
        with closing(loader):
            yield self._copies(loader)

    def _copies(self, loader: Batches) -> Iterator[Batch]:
        """Copy batches to the device, because the loader reuses their memory, and keep them if the set is small."""
        device, kept = self._precision.device, []
        channels, height, width = self._augment.shape
        is_small = self._num_samples * channels * height * width * 4 <= KEPT_BYTES
        for images, labels in loader:
            batch = images.to(device, copy=True), labels.to(device, copy=True)
            if is_small:
                kept.append(batch)
            yield batch
        self._kept = kept if is_small else None


def predict(model: nn.Module, images: Tensor, precision: Precision | None = None) -> Tensor:
    """Return the network's outputs in float32."""
    if precision is None:
        return model(images).float()  # type: ignore[no-any-return]
    with precision.autocast():
        return model(images).float()  # type: ignore[no-any-return]
