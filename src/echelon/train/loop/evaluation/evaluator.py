"""What a run measures between its steps and at its end: validation, the target accuracy, whether it learns at all.

Every process has an `Evaluator`, and the lowest living rank uses it (`KVStore.is_first`), so that the death of any
process leaves another one that measures.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import Tensor

from echelon.data.sets.datasets import Dataset
from echelon.train.loop.evaluation.evaluate import Validation
from echelon.train.loop.evaluation.learning import LearningCheck
from echelon.train.loop.reports.reporting import Reporter
from echelon.train.loop.stopping import Interrupted, StopSignals
from echelon.train.recipe.options import TrainOptions
from echelon.train.step.average import MovingAverage
from echelon.train.step.metrics import Metrics
from echelon.train.step.precision import Precision
from echelon.train.trainer.base import Trainer
from echelon.train.trainer.step_times import Phase

log = logging.getLogger(__name__)


class Evaluator:
    """Measures the model of one process. `measured` are the metrics of its last validation."""

    def __init__(
        self,
        options: TrainOptions,
        dataset: Dataset,
        trainer: Trainer,
        metrics: Metrics,
        logged: tuple[str, ...],
        precision: Precision,
        average: MovingAverage | None,
        stop: StopSignals,
        report: Reporter,
    ) -> None:
        """`logged` are the metrics of the log; `metrics` may have one more for curves."""
        self._target = options.target_accuracy
        self._trainer = trainer
        self._kvstore = trainer.kvstore
        self._metrics = metrics
        self._logged = logged
        self._stop = stop
        self._report = report
        self._validation: Validation | None = None
        if dataset.validation is not None:
            self._validation = Validation(
                dataset.validation, dataset.augment, options, metrics.with_cross_entropy(), precision, average
            )
        checked = not options.benchmark  # random labels cannot be learned
        self._learning = LearningCheck(options, dataset.num_classes) if checked else None
        self._reached_target = False
        self.measured: dict[str, float] = {}

    def evaluate(
        self,
        epoch: int,
        epochs: float,
        batch: int | None,
        seconds: float,
        num_steps: int,
        before_report: Callable[[], None] = lambda: None,
    ) -> None:
        """Validate, and stop the run if the target accuracy is reached.

        `epochs` are done, with a fraction; `batch` is None at the end of an epoch; `seconds` and `num_steps` are those
        since the beginning. `before_report` is called when the result is known and not logged yet.
        """
        if self._validation is None or self._reached_target:
            return
        measured = self._measure(self._validation, epochs)
        if measured is None:
            return
        self.measured = measured
        before_report()
        self._kvstore.events.write("validation", seconds=round(seconds, 6), **self._event(epochs, measured))
        self._report.validation(epoch, batch, {name: measured[name] for name in self._logged})
        accuracy = measured["accuracy"]
        if self._target is not None and accuracy >= self._target and not self._kvstore.halted:
            self._reached_target = True
            self._kvstore.halt(f"target accuracy {self._target:g} reached: {accuracy:.4f} after {num_steps} steps")

    def measure_final(self, epochs: float) -> dict[str, float] | None:
        """Validate the final weights; None without validation data, or if a signal ended the validation."""
        measured = None if self._validation is None else self._measure(self._validation, epochs)
        if measured is not None:
            self._kvstore.events.write("final", **self._event(epochs, measured))
        return measured

    def check_learning(self, epoch: int, steps: int, sums: Tensor) -> None:
        """Judge an epoch by its training metrics; by the validation loss if the training loss is not measured.

        Every process compares its epochs, and the first living one reports.
        """
        if self._learning is None:
            return
        means = self._metrics.values(sums)
        loss = means.get("cross-entropy", self.measured.get("cross-entropy"))
        for text in self._learning.after_epoch(epoch + 1, steps, int(sums[-1]), means["accuracy"], loss):
            if self._kvstore.is_first:
                log.warning(text)
                self._kvstore.events.write("warning", text=text)

    def _measure(self, validation: Validation, epochs: float) -> dict[str, float] | None:
        """Measure the validation data after some epochs. A signal ends it at once; then the result is None."""

        def report(done: int, total: int) -> None:
            self._kvstore.events.write("validation", epoch=epochs, done=done, total=total)
            self._report.validating(done, total)

        try:
            with self._trainer.times.during(Phase.OTHER):
                return validation.measure(self._trainer.model, self._stop, report)
        except Interrupted as signal:
            self._report.info(f"validation stopped: {signal}")
            return None

    def _event(self, epochs: float, measured: dict[str, float]) -> dict[str, object]:
        """Return the fields of an event. `metrics` are what --top-k, --loss and --metrics added to the accuracy."""
        added = {name: measured[name] for name in self._logged if name != "accuracy"}
        return {
            "epoch": epochs,
            "accuracy": measured["accuracy"],
            "loss": measured["cross-entropy"],
            "metrics": added,
        }
