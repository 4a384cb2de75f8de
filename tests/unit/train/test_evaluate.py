"""Validation: all samples or a fixed random part of them, its progress, and what a signal leaves behind."""

from __future__ import annotations

import io
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from echelon.data.images.config import AugmentConfig
from echelon.data.loading.memory import MemorySource
from echelon.data.loading.order import RandomPart
from echelon.data.loading.sources import RecordSource, Source
from echelon.data.records import Header, IndexedWriter, pack
from echelon.train.loop.evaluation import evaluate
from echelon.train.loop.evaluation.evaluate import Validation
from echelon.train.loop.stopping import Interrupted, StopSignals
from echelon.train.recipe.options import TrainOptions
from echelon.train.step.average import MovingAverage
from echelon.train.step.metrics import Metrics
from echelon.train.step.precision import choose_precision

NUM_SAMPLES, NUM_CLASSES = 1200, 4
SHAPE = (1, 2, 2)


class ByPixel(nn.Module):
    """Predicts the class that an image's pixels are, and records the classes it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.seen: list[int] = []

    def forward(self, images: Tensor) -> Tensor:
        classes = images.mean((1, 2, 3)).round().long()
        self.seen += classes.tolist()
        return nn.functional.one_hot(classes, NUM_CLASSES).float() * 10 * self.scale


def sorted_labels() -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Labels sorted by class, as in a folder or a file made from one."""
    return np.arange(NUM_SAMPLES) * NUM_CLASSES // NUM_SAMPLES


def in_memory(tmp_path: Path) -> Source:
    labels = sorted_labels()
    images = np.broadcast_to(labels.astype(np.uint8)[:, None, None, None], (NUM_SAMPLES, 2, 2, 1))
    return MemorySource(np.ascontiguousarray(images), labels)


def in_records(tmp_path: Path) -> Source:
    with IndexedWriter(tmp_path / "val.rec") as writer:
        for number, label in enumerate(sorted_labels()):
            writer.write(number, pack(Header(float(label), number), _png(int(label))))
    return RecordSource(tmp_path / "val.rec")


def _png(value: int) -> bytes:
    file = io.BytesIO()
    Image.new("L", (2, 2), value).save(file, "PNG")
    return file.getvalue()


def validation(
    source: Source, average: MovingAverage | None = None, *, num_val_examples: int | None = None
) -> Validation:
    augment = AugmentConfig(shape=SHAPE, rgb_mean=(0.0,), rgb_std=(1.0,))
    metrics = Metrics(0, "").with_cross_entropy()
    precision = choose_precision("float32", torch.device("cpu"))
    options = TrainOptions(num_val_examples=num_val_examples)
    return Validation(source, augment, options, metrics, precision, average)


def measure(made: Validation, model: nn.Module) -> tuple[dict[str, float], list[tuple[int, int]]]:
    """Return the metrics, and the progress that was reported."""
    reported: list[tuple[int, int]] = []
    found = made.measure(model, StopSignals(), lambda done, total: reported.append((done, total)))
    return found, reported


@pytest.mark.parametrize("kept_bytes", [evaluate.KEPT_BYTES, 0])
@pytest.mark.parametrize("make_source", [in_memory, in_records])
def test_a_part_of_the_validation_data_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_source: type, kept_bytes: int
) -> None:
    monkeypatch.setattr(evaluate, "KEPT_BYTES", kept_bytes)
    made, model = validation(make_source(tmp_path), num_val_examples=700), ByPixel()
    found = [measure(made, model) for _ in range(2)]
    assert found[0] == found[1]
    assert found[0][1] == [(0, 700), (500, 700), (700, 700)]
    first, second = model.seen[:700], model.seen[700:1400]
    assert first == second, "every evaluation has the same samples"
    assert min(first.count(number) for number in range(NUM_CLASSES)) > 140, "all classes are in it"
    assert model.training


def test_all_samples_are_measured_by_default_and_if_more_are_asked_for(tmp_path: Path) -> None:
    for number in (None, 10**6):
        model = ByPixel()
        found, reported = measure(validation(in_memory(tmp_path), num_val_examples=number), model)
        assert found["accuracy"] == 1
        assert reported == [(0, 1200), (500, 1200), (1000, 1200), (1200, 1200)]
        assert model.seen == sorted_labels().tolist()


def test_a_random_part_has_distinct_samples_in_ascending_order() -> None:
    positions = RandomPart(100).positions(1000)
    assert len(set(positions.tolist())) == 100
    assert (np.diff(positions) > 0).all()
    assert positions.tolist() == RandomPart(100).positions(1000).tolist()
    assert RandomPart(5).positions(3).tolist() == [0, 1, 2]


class Interrupting(ByPixel):
    """Sends its process a signal in its second batch, and catches what is an Exception."""

    def forward(self, images: Tensor) -> Tensor:
        if self.seen:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                self.seen.append(-1)
            except Exception:
                self.seen.append(-2)
        return super().forward(images)


def test_a_signal_ends_the_batch_and_restores_the_weights_and_the_mode(tmp_path: Path) -> None:
    model, stop = Interrupting(), StopSignals()
    average = MovingAverage(model, steps=10)
    for value in (1.0, 3.0):
        model.scale.data.fill_(value)
        average.update()
        average.num_steps += 1
    made = validation(in_memory(tmp_path), average)
    with stop.recorded(), pytest.raises(Interrupted, match="SIGTERM"):
        made.measure(model, stop, lambda done, total: None)
    assert len(model.seen) == 500
    assert float(model.scale.detach()) == 3
    assert model.training
    assert measure(made, ByPixel())[0]["accuracy"] == 1, "the data can be measured again"


def test_a_signal_before_a_batch_ends_validation_too(tmp_path: Path) -> None:
    model, stop = ByPixel(), StopSignals()

    def interrupt(done: int, total: int) -> None:
        if done == 500:
            os.kill(os.getpid(), signal.SIGINT)

    with stop.recorded(), pytest.raises(Interrupted, match="SIGINT"):
        validation(in_memory(tmp_path)).measure(model, stop, interrupt)
    assert len(model.seen) == 500
