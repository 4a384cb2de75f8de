"""Flags that can do nothing: a line for those of MXNet that the user gave, and none for a script's defaults."""

from __future__ import annotations

import logging
import shlex

import pytest

from echelon.cli.main import main
from echelon.data.images.config import AugmentConfig
from echelon.errors import UsageError
from echelon.train import script
from echelon.train.flags.no_effect import check_validation, lines_about, warn, warn_of_crop
from echelon.train.recipe.options import TrainOptions

STEPS = "--lr-step-epochs 30,60 has no effect"
PARSER = script.make_parser(None)
PARSER.set_defaults(lr_step_epochs="200,250", macrobatch_size=8, lr_schedule="cosine")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--lr-step-epochs 30,60", f"{STEPS}: --lr-schedule cosine has no steps"),
        ("--lr-s 200,250", "--lr-step-epochs 200,250 has no effect: --lr-schedule cosine has no steps"),
        ("--lr-step-epochs pow2", "--lr-step-epochs pow2 has no effect: --lr-schedule cosine has no steps"),
        ("--lr-step-epochs 30,60 --lr-schedule constant", f"{STEPS}: --lr-schedule constant has no steps"),
        ("--lr-step-epochs 30,60 --lr-schedule poly", f"{STEPS}: --lr-schedule poly has no steps"),
        ("--lr-step-epochs 30,60 --lr-schedule step --lr-factor 1", f"{STEPS}: --lr-factor 1 leaves the rate as it is"),
        ("--macrobatch-size 64", "--macrobatch-size 64 has no effect: only --optimizer lbsgd warms up to it, not sgd"),
        (
            "--macrobatch-size 64 --optimizer lbsgd --warmup-strategy lars",
            "--macrobatch-size 64 has no effect: --warmup-strategy lars goes by the norms of the weights",
        ),
        ("--gc-threshold 0.5", "--gc-threshold 0.5 has no effect: gradients are not compressed yet"),
        ("--min-random-area 0.08", "--min-random-area 0.08 has no effect: only --random-resized-crop 1 draws areas"),
        (
            "--max-random-ar 2 --random-resized-crop 0",
            "--max-random-area 2 has no effect: only --random-resized-crop 1 draws areas",
        ),
        ("--gc-type none --gc-th 2", "--gc-threshold 2 has no effect: gradients are not compressed yet"),
    ],
)
def test_a_flag_that_was_given_and_does_nothing_has_its_line(arguments: str, said: str) -> None:
    assert lines_about(PARSER.parse_args(shlex.split(arguments))) == [said]


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "--optimizer adam",
        "--lr-step-epochs ''",
        "--macrobatch-size 0",
        "--lr-step-epochs 30,60 --lr-schedule step",
        "--lr-step-epochs pow2 --lr-schedule step",
        "--lr-step-epochs pow2 --lr-schedule poly",
        "--macrobatch-size 64 --optimizer LBSGD",
        "--min-random-area 0.08 --max-random-area 2 --random-resized-crop 1",
        "--min-random-area 1 --max-random-area 1",
    ],
)
def test_defaults_and_what_has_an_effect_are_passed_over(arguments: str) -> None:
    assert lines_about(PARSER.parse_args(shlex.split(arguments))) == []


def test_the_lines_are_warnings_each_once(caplog: pytest.LogCaptureFixture) -> None:
    warn(PARSER.parse_args(["--gc-threshold", "0.5", "--macrobatch-size", "8", "--gc-threshold", "1"]))
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert [line.split()[0] for line in caplog.messages] == ["--macrobatch-size", "--gc-threshold"]
    assert "--gc-threshold 1 has" in caplog.messages[1], "the last one counts"


def test_the_command_warns_too_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    assert main(shlex.split("train --test-io 1 --lr-schedule cosine --lr-step-epochs 3 --disp-batches 40")) == 0
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warned == ["--lr-step-epochs 3 has no effect: --lr-schedule cosine has no steps"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            TrainOptions(data="folder", target_accuracy=0.9),
            "--target-accuracy 0.9 looks at validation data, and folder has none here: give --data-val, or leave it "
            "out",
        ),
        (
            TrainOptions(benchmark=True, target_accuracy=1.0, eval_every=40),
            "--target-accuracy 1 and --eval-every 40 look at validation data, and --benchmark 1 has none: leave them "
            "out",
        ),
    ],
)
def test_what_looks_at_validation_data_needs_some(options: TrainOptions, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        check_validation(options, has_validation=False)
    assert str(refused.value) == said
    check_validation(options, has_validation=True)
    check_validation(TrainOptions(data="folder"), has_validation=False)


def test_a_random_crop_with_nothing_to_choose_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_crop(AugmentConfig())
    warn_of_crop(AugmentConfig(random_resized_crop=True, min_random_area=0.08))
    warn_of_crop(AugmentConfig(random_resized_crop=True, max_random_aspect_ratio=0.25))
    assert not caplog.messages
    warn_of_crop(AugmentConfig(random_resized_crop=True))
    assert ["crops the middle" in line for line in caplog.messages] == [True]
