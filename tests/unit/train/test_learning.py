"""The warnings of a run that does not learn."""

from __future__ import annotations

import math

import pytest

from echelon.train.loop.evaluation.learning import MIN_STEPS, LearningCheck, chance
from echelon.train.recipe.options import TrainOptions

OPTIONS = TrainOptions(lr=0.05, kv_store="dist_async")


def check(options: TrainOptions = OPTIONS) -> LearningCheck:
    return LearningCheck(options, num_classes=10)


def test_an_accuracy_at_chance_is_reported_once() -> None:
    learning = check()
    (text,) = learning.after_epoch(1, 100, 6400, 0.098, None)
    assert text == (
        "epoch 1: the accuracy of 0.0980 is that of guessing (0.1 with 10 classes): try a smaller --lr (0.005 instead "
        "of 0.05), --kv-store dist_sync, to see whether stale gradients are the cause"
    )
    assert learning.after_epoch(2, 100, 6400, 0.098, None) == []


@pytest.mark.parametrize(("accuracy", "steps"), [(0.3, 100), (0.098, MIN_STEPS - 1)])
def test_a_run_that_learns_or_has_just_begun_is_not_reported(accuracy: float, steps: int) -> None:
    assert check().after_epoch(1, steps, 6400, accuracy, 2.0) == []


def test_short_epochs_are_judged_when_there_were_enough_steps() -> None:
    learning = check()
    assert learning.after_epoch(1, MIN_STEPS - 1, 640, 0.098, None) == []
    assert len(learning.after_epoch(2, MIN_STEPS - 1, 640, 0.098, None)) == 1


def test_a_loss_that_grows_for_an_epoch_is_reported() -> None:
    learning = check()
    assert learning.after_epoch(1, 100, 6400, 0.5, 1.5) == []
    assert learning.after_epoch(2, 100, 6400, 0.5, 1.6) == []  # within the usual variation
    (text,) = learning.after_epoch(3, 100, 6400, 0.5, 2.5)
    assert "epoch 3: the loss grew from 1.6 to 2.5: try" in text


def test_growth_of_a_tiny_loss_is_not_reported() -> None:
    learning = check()
    assert learning.after_epoch(1, 100, 6400, 1.0, 0.001) == []
    assert learning.after_epoch(2, 100, 6400, 1.0, 0.01) == []


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_reported(loss: float) -> None:
    (text,) = check().after_epoch(1, 100, 6400, 0.5, loss)
    assert f"the loss is {loss}; --check-finite names" in text


def test_mxnets_scale_is_the_first_suspect() -> None:
    (text,) = check(TrainOptions(lr=0.1, kv_store="dist_async", lr_scale="mxnet")).after_epoch(1, 99, 999, 0.1, None)
    assert "try --lr-scale share, a smaller --lr" in text


def test_lock_step_has_no_stale_gradients() -> None:
    (text,) = check(TrainOptions(lr=0.1, kv_store="dist_sync")).after_epoch(1, 99, 999, 0.1, None)
    assert text.endswith("try a smaller --lr (0.01 instead of 0.1), or check the labels of the data")


def test_chance_allows_for_few_samples_and_unequal_classes() -> None:
    assert chance(10, 10**9) == pytest.approx(0.12, abs=1e-4)
    assert chance(10, 1000) == pytest.approx(0.15, abs=2e-3)
    assert chance(10, 100) == 0.15  # 0.19 of 100 samples may be learned, too
    assert chance(1, 10) == 1.0


def test_an_epoch_without_samples_has_no_loss() -> None:
    assert check().after_epoch(1, 100, 0, math.nan, math.nan) == []
