"""The checks of flags: values, combinations, the job's workers and servers, and what needs the data."""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from echelon.data.images.config import AugmentConfig
from echelon.data.sets.datasets import Dataset, open_dataset
from echelon.environment import Job
from echelon.errors import UsageError
from echelon.train import script
from echelon.train.flags.arguments import options_from
from echelon.train.flags.check import check_flags, check_with_data
from echelon.train.recipe.options import TrainOptions

PARSER = script.make_parser(None)
PARSER.set_defaults(kv_store="local")


def check(parser: argparse.ArgumentParser, arguments: str, job: Job | None = None, data: str = "digits") -> None:
    """Check a command line; with a job, as the command that starts it."""
    given = parser.parse_args(arguments.split())
    hosts = None if job is None else dict.fromkeys(range(job.num_workers), "127.0.0.1")
    check_flags(given, options_from(given, data), job or Job(), worker_hosts=hosts)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--label-smoothing 2", "--label-smoothing must be between 0 and 1, not 2"),
        ("--label-smoothing -1", "--label-smoothing must be between 0 and 1, not -1"),
        ("--num-examples -5", "--num-examples must be 1 or more, not -5"),
        ("--num-examples 0", "--num-examples must be 1 or more, not 0"),
        ("--num-val-examples 0", "--num-val-examples must be 1 or more, not 0"),
        ("--num-classes 0", "--num-classes must be 1 or more, not 0"),
        ("--pace -1", "--pace must be between 0 and 86400, not -1"),
        ("--ema-epochs nan", "--ema-epochs must be between 0 and 10000, not nan"),
        ("--mixup nan", "--mixup must be 0 or more, and finite, not nan"),
        ("--batch-size 3000000000", "--batch-size must be 2147483647 or less, not 3000000000"),
        ("--load-epoch -1", "--load-epoch must be 0 or more, not -1"),
        ("--top-k 1", "--top-k 1: give 2 or more, or 0 for none"),
        ("--model-prefix b/", "--model-prefix 'b/' does not end with a file name; add one, for example b/model"),
        ("--slow 0:1e30", "--slow 0:1e30: the factor must be between 1 and 1,000,000"),
        ("--stall 0.1:nan", "--stall 0.1:nan: the factor must be between 1 and 1,000,000"),
        ("--stall nan:2", "--stall nan:2: the probability must be between 0 and 1"),
    ],
)
def test_an_invalid_value_is_rejected_with_the_flag_the_value_and_what_is_valid(arguments: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        check(PARSER, arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["train_mnist", "train_cifar10", "train_imagenet", "dist_sync_mlp"])
def test_the_defaults_of_the_scripts_pass(name: str) -> None:
    path = Path(__file__).parents[3] / "examples" / "image-classification" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"check_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    check(module.parser, "", data="imagenet")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--slow 1:3", "--slow and --stall multiply the seconds of --pace"),
        ("--stall 0.1:5", "--slow and --stall multiply the seconds of --pace"),
        ("--save-batches 5", "--save-batches 5 needs a file name: give --model-prefix too"),
        ("--load-epoch 3", "to resume from a checkpoint, give its prefix: --model-prefix PREFIX"),
        ("--resume auto", "to resume from a checkpoint, give its prefix: --model-prefix PREFIX"),
        ("--data-sharding mine", "--data-sharding mine is not read without --data-allocator 1"),
        ("--load-epoch 3 --resume auto --model-prefix m", "--load-epoch 3 and --resume auto both choose a checkpoint"),
    ],
)
def test_a_flag_that_needs_or_excludes_another_is_rejected(arguments: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check(PARSER, arguments)


@pytest.mark.parametrize(
    ("arguments", "job", "message"),
    [
        ("", Job(num_workers=2), "--kv-store local is for one worker; with -n 2 use a dist_ store"),
        ("--kv-store dist_async", Job(num_workers=2), "--kv-store dist_async needs a server, but -s is 0"),
        ("--kv-store dist_ssync", Job(num_servers=1), "dist_ssync needs a bound"),
        ("--kv-store dist_sync --groups 0/1", Job(num_workers=2, num_servers=1), "--groups 0/1 has no meaning"),
        ("--pace 1 --slow 2:3", Job(), "--slow names worker 2, but ranks go from 0 to 0"),
        (
            "--kv-store dist_sync --data-allocator 2",
            Job(num_workers=2),
            "--data-allocator 2 needs a server, but",
        ),
        ("--kv-store dist_sync --batch-by-speed", Job(num_workers=2), "--batch-by-speed needs a server, but -s is 0"),
        ("--data-allocator 1 --data-sharding nosuch", Job(), "--data-allocator 1 needs the file nosuch"),
    ],
)
def test_workers_and_servers_must_suit_the_store(arguments: str, job: Job, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check(PARSER, arguments, job)


def test_dist_sync_needs_no_server() -> None:
    check(PARSER, "--kv-store dist_sync", Job(num_workers=2))


CODE = """
import sys
from echelon.train import script
try:
    script.run(script.make_parser(None), "digits", sys.argv[1:])
except SystemExit as error:
    print(error)
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize(
    "arguments", ["--batch-size 0", "--network nosuch", "--lr-step-epochs 9,3", "--kv-store nosuch"]
)
def test_most_mistakes_are_reported_without_importing_torch(arguments: str) -> None:
    done = subprocess.run([sys.executable, "-c", CODE, *arguments.split()], capture_output=True, text=True, check=True)
    assert "error: " in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            TrainOptions(data="folder", target_accuracy=0.9),
            "--target-accuracy 0.9 needs validation data, but folder has none here: give --data-val, or leave it out",
        ),
        (
            TrainOptions(benchmark=True, target_accuracy=1.0, eval_every=40),
            "--target-accuracy 1 and --eval-every 40 need validation data, but --benchmark 1 has none: leave them out",
        ),
        (
            TrainOptions(benchmark=True, num_val_examples=100),
            "--num-val-examples 100 needs validation data, but --benchmark 1 has none: leave it out",
        ),
    ],
)
def test_flags_that_need_validation_data_are_rejected_without_it(options: TrainOptions, message: str) -> None:
    with pytest.raises(UsageError) as rejected:
        check_with_data(options, dataset(validation=False))
    assert str(rejected.value) == message
    check_with_data(options, dataset())
    check_with_data(TrainOptions(data="folder"), dataset(validation=False))


def test_a_random_crop_without_a_choice_causes_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    for augment in (
        AugmentConfig(),
        AugmentConfig(random_resized_crop=True, min_random_area=0.08),
        AugmentConfig(random_resized_crop=True, max_random_aspect_ratio=0.25),
    ):
        check_with_data(TrainOptions(), dataset(augment))
    assert not caplog.messages
    check_with_data(TrainOptions(), dataset(AugmentConfig(random_resized_crop=True)))
    assert ["crops the centre" in line for line in caplog.messages] == [True]


def dataset(augment: AugmentConfig | None = None, *, validation: bool = True) -> Dataset:
    digits = open_dataset("digits")
    return replace(digits, augment=augment or digits.augment, validation=digits.validation if validation else None)
