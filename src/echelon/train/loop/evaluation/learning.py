"""Notices that a run does not learn: its accuracy stays at chance, or its loss grows for a whole epoch.

Such a run ends like any other, with status 0 and a checkpoint, and the cause is often one flag. Each symptom is
reported once per run, with what to try.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from echelon.schemes.stores import store_kind
from echelon.train.recipe.options import TrainOptions

MIN_STEPS = 20  # fewer steps may be too few to learn anything
_GROWTH = 1.1  # losses of neighbouring epochs differ by a few percent in a healthy run
_SMALL_LOSS = 0.05  # below it, growth is noise
_MARGIN = 1.2  # classes are rarely of equal size, so guessing the largest one is right more often than 1 / classes
_SIGMAS = 3.0
_LARGEST = 1.5  # times 1 / classes; a higher accuracy of few samples may be learned or guessed, and is not reported


@dataclass
class LearningCheck:
    """Compares each epoch with chance and with the epoch before. `num_classes` are those of the data."""

    options: TrainOptions
    num_classes: int
    _reported: set[str] = field(default_factory=set)
    _last_loss: float | None = None
    _steps: int = 0

    def after_epoch(self, epoch: int, steps: int, samples: int, accuracy: float, loss: float | None) -> list[str]:
        """Return the warnings after an epoch. `epoch` counts from 1; `accuracy` and `loss` are means over `samples`."""
        if not samples:
            return []  # a worker that got none has no loss
        found = {}
        if loss is not None and not math.isfinite(loss):
            found["finite"] = f"the loss is {loss}; --check-finite names the first worker and parameter"
        elif loss is not None and self._last_loss is not None and loss > max(_GROWTH * self._last_loss, _SMALL_LOSS):
            found["growth"] = f"the loss grew from {self._last_loss:.4g} to {loss:.4g}"
        self._last_loss = loss
        self._steps += steps
        if self._steps >= MIN_STEPS and accuracy <= chance(self.num_classes, samples):
            guessing = 1 / self.num_classes
            found["chance"] = (
                f"the accuracy of {accuracy:.4f} is that of guessing ({guessing:.4g} with {self.num_classes} classes)"
            )
        new = {symptom: text for symptom, text in found.items() if symptom not in self._reported}
        self._reported |= new.keys()
        return [f"epoch {epoch}: {text}: try {self._advice()}" for text in new.values()]

    def _advice(self) -> str:
        options, kind = self.options, store_kind(self.options.kv_store)
        ideas = [f"a smaller --lr ({options.lr / 10:g} instead of {options.lr:g})"]
        if kind.scheme in ("ASP", "SSP") and options.lr_scale == "mxnet":
            ideas.insert(0, "--lr-scale share")
        if kind.scheme != "BSP":
            ideas.append("--kv-store dist_sync, to see whether stale gradients are the cause")
        else:
            ideas.append("or check the labels of the data")
        return ", ".join(ideas)


def chance(num_classes: int, samples: int) -> float:
    """Return the highest accuracy that guessing can explain for this number of samples."""
    p = min(1.0, _MARGIN / num_classes)
    return min(p + _SIGMAS * math.sqrt(p * (1 - p) / max(samples, 1)), _LARGEST / num_classes)
