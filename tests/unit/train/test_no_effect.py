"""Flags without effect: a warning for those of MXNet that the user gave, and none for a script's defaults."""

from __future__ import annotations

import logging
import shlex

import pytest

from echelon.cli import train
from echelon.cli.main import main
from echelon.train import script
from echelon.train.flags.check import warn_about_effects, warnings_about
from echelon.train.flags.parser import Parser

STEPS = "--lr-step-epochs 30,60 has no effect"
PARSER = script.make_parser(None)
PARSER.set_defaults(lr_step_epochs="200,250", macrobatch_size=8, lr_schedule="cosine")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--lr-step-epochs 30,60", f"{STEPS}: --lr-schedule cosine has no steps"),
        ("--lr-s 200,250", "--lr-step-epochs 200,250 has no effect: --lr-schedule cosine has no steps"),
        ("--lr-step-epochs pow2", "--lr-step-epochs pow2 has no effect: --lr-schedule cosine has no steps"),
        ("--lr-step-epochs 30,60 --lr-schedule constant", f"{STEPS}: --lr-schedule constant has no steps"),
        ("--lr-step-epochs 30,60 --lr-schedule poly", f"{STEPS}: --lr-schedule poly has no steps"),
        (
            "--lr-step-epochs 30,60 --lr-schedule step --lr-factor 1",
            f"{STEPS}: --lr-factor 1 does not lower the learning rate",
        ),
        (
            "--lr 0.1 --optimizer AdaDelta",
            "--lr 0.1 has no effect: MXNet's adadelta has no learning rate (torch's has: --optimizer-style torch)",
        ),
        ("--macrobatch-size 64", "--macrobatch-size 64 has no effect: only --optimizer lbsgd uses it, not sgd"),
        ("--gc-threshold 0.5", "--gc-threshold 0.5 has no effect: gradient compression is not implemented yet"),
        ("--min-random-area 0.08", "--min-random-area 0.08 has no effect: only --random-resized-crop 1 uses it"),
        (
            "--max-random-ar 2 --random-resized-crop 0",
            "--max-random-area 2 has no effect: only --random-resized-crop 1 uses it",
        ),
        (
            "--min-random-area 0.08 --use-imagenet-data-augmentation 1 --random-resized-crop 0",
            "--min-random-area 0.08 has no effect: only --random-resized-crop 1 uses it",
        ),
        (
            "--profile-worker-suffix worker.json",
            "--profile-worker-suffix worker.json has no effect: Echelon writes no profiles; use torch.profiler in a "
            "loop of your own",
        ),
        (
            "--profile-s server.json",
            "--profile-server-suffix server.json has no effect: Echelon writes no profiles; use torch.profiler in a "
            "loop of your own",
        ),
        ("--gc-type none --gc-th 2", "--gc-threshold 2 has no effect: gradient compression is not implemented yet"),
    ],
)
def test_a_given_flag_without_effect_causes_a_warning(arguments: str, message: str) -> None:
    assert warnings_about(PARSER.parse_args(shlex.split(arguments))) == [message]


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "--optimizer adam",
        "--optimizer adadelta",
        "--optimizer adadelta --optimizer-style torch --lr 0.1",
        "--lr-step-epochs ''",
        "--macrobatch-size 0",
        "--lr-step-epochs 30,60 --lr-schedule step",
        "--lr-step-epochs pow2 --lr-schedule step",
        "--lr-step-epochs pow2 --lr-schedule poly",
        "--macrobatch-size 64 --optimizer LBSGD",
        "--macrobatch-size 64 --optimizer lbsgd --warmup-strategy lars",
        "--min-random-area 0.08 --max-random-area 2 --random-resized-crop 1",
        "--min-random-area 1 --max-random-area 1",
        "--min-random-area 0.2 --use-imagenet-data-augmentation 1",
        "--profile-worker-suffix '' --profile-server-suffix ''",
    ],
)
def test_defaults_and_flags_with_an_effect_cause_no_warning(arguments: str) -> None:
    assert warnings_about(PARSER.parse_args(shlex.split(arguments))) == []


def test_imagenet_augmentation_has_no_effect_on_a_script_without_augmentation() -> None:
    parser = script.make_parser(None, images=False)
    expected = "--use-imagenet-data-augmentation 1 has no effect: this script does not augment its images"
    assert warnings_about(parser.parse_args(["--use-imagenet-data-augmentation", "1"])) == [expected]
    assert warnings_about(parser.parse_args(["--use-imagenet-data-augmentation", "0"])) == []


def test_each_warning_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    warn_about_effects(PARSER.parse_args(["--gc-threshold", "0.5", "--macrobatch-size", "8", "--gc-threshold", "1"]))
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert [line.split()[0] for line in caplog.messages] == ["--macrobatch-size", "--gc-threshold"]
    assert "--gc-threshold 1 has" in caplog.messages[1], "the last value counts"


def test_echelon_train_warns_and_continues(caplog: pytest.LogCaptureFixture) -> None:
    assert main(shlex.split("train --test-io 1 --lr-schedule cosine --lr-step-epochs 3 --disp-batches 40")) == 0
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warned == ["--lr-step-epochs 3 has no effect: --lr-schedule cosine has no steps"]


def test_echelon_train_says_once_that_servers_have_no_effect(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(shlex.split("train -n 2 -s 2 --kv-store dist_device_sync --test-io 1 --disp-batches 40")) == 0
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warned == ["--num-servers 2 has no effect: dist_device_sync runs without servers"]
    assert "no effect" not in capsys.readouterr().err, "the warning is only logged"


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (
            "-n 2 -s 2 --kv-store dist_device_sync",
            ["--num-servers 2 has no effect: dist_device_sync runs without servers"],
        ),
        ("-n 2 --kv-store dist_device_sync", []),
        ("-n 2 -s 0 --kv-store dist_device_sync", []),
        ("-n 2 -s 2 --kv-store dist_sync", []),
        ("-n 2 -s 2", []),  # the store is chosen by the number of workers
    ],
)
def test_servers_that_a_store_does_not_use(arguments: str, messages: list[str]) -> None:
    parser = Parser()
    train.add_flags(parser)
    assert warnings_about(parser.parse_args(shlex.split(arguments))) == messages
