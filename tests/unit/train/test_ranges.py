"""Every number that a flag takes is looked at before anything starts: 0, -1, no number, and one too large."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest

from echelon.data.images.config import AugmentConfig
from echelon.environment import Job
from echelon.errors import UsageError
from echelon.train.flags.arguments import (
    Parser,
    add_augment_arguments,
    add_data_arguments,
    add_fit_arguments,
    options_from,
)
from echelon.train.recipe.ranges import RANGES, check_numbers
from echelon.train.script import check

PARSER = Parser()
add_fit_arguments(PARSER)
add_data_arguments(PARSER)
IMAGES = Parser()
add_augment_arguments(IMAGES)

SWITCHES = {"test_io", "benchmark", "data_allocator", "push_factors", "use_imagenet_data_augmentation"}
ANY_WHOLE_NUMBER = {*SWITCHES, "save_period"}  # MXNet takes less than 1 for 1 there
FROM_ONE = {"batch_size", "num_epochs", "num_layers", "num_classes", "num_examples", "disp_batches", "data_nthreads"}
BELOW_ZERO = {"seed"}
HUGE_FLOATS = {"lr", "lr_factor", "wd", "warmup_epochs", "gc_threshold", "mixup"}


def numeric(parser: Parser, kind: type) -> list[str]:
    return sorted(action.dest for action in parser._actions if action.type is kind)


WHOLE = [name for name in numeric(PARSER, int) if name not in ANY_WHOLE_NUMBER]
FLOATS = numeric(PARSER, float)


def test_every_numeric_flag_has_its_range() -> None:
    assert {*WHOLE, *FLOATS} == RANGES.keys()


def said_about(name: str, value: float) -> str:
    """The error, or nothing where the value is taken."""
    try:
        check_numbers({name: value})
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", [*WHOLE, *FLOATS])
def test_zero_and_less(name: str) -> None:
    kind = float if name in FLOATS else int
    assert bool(said_about(name, kind(0))) == (name in FROM_ONE)
    assert bool(said_about(name, kind(-1))) == (name not in BELOW_ZERO)


@pytest.mark.parametrize("name", FLOATS)
def test_what_is_no_number_never_passes(name: str) -> None:
    flag = f"--{name.replace('_', '-')} must be "
    for value in (math.nan, math.inf, -math.inf):
        assert said_about(name, value).startswith(flag)
        assert said_about(name, value).endswith(f", not {value}")
    assert bool(said_about(name, 1e30)) == (name not in HUGE_FLOATS)


@pytest.mark.parametrize("name", WHOLE)
def test_a_count_beyond_all_counts_is_refused(name: str) -> None:
    assert said_about(name, 10**30).endswith(f", not {10**30}")
    for text in ("nan", "inf", "1e30"):
        with pytest.raises(UsageError, match=f"invalid int value: '{text}'"):
            PARSER.parse_args([f"--{name.replace('_', '-')}", text])


@pytest.mark.parametrize("name", numeric(IMAGES, float))
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_done_to_images_has_finite_numbers(name: str, value: float) -> None:
    given: dict[str, Any] = {name: value}
    with pytest.raises(UsageError, match=f"{name} must be a finite number"):
        AugmentConfig(**given)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--label-smoothing 2", "--label-smoothing must be between 0 and 1, not 2"),
        ("--label-smoothing -1", "--label-smoothing must be between 0 and 1, not -1"),
        ("--num-examples -5", "--num-examples must be 1 or more, not -5"),
        ("--num-examples 0", "--num-examples must be 1 or more, not 0"),
        ("--num-classes 0", "--num-classes must be 1 or more, not 0"),
        ("--pace -1", "--pace must be between 0 and 86400, not -1"),
        ("--ema-epochs nan", "--ema-epochs must be between 0 and 10000, not nan"),
        ("--mixup nan", "--mixup must be 0 or more, and finite, not nan"),
        ("--batch-size 3000000000", "--batch-size must be 2147483647 or less, not 3000000000"),
        ("--load-epoch -1", "--load-epoch must be 0 or more, not -1"),
        ("--top-k 1", "--top-k 1: give 2 or more, or 0 for none"),
        ("--model-prefix b/", "--model-prefix 'b/' is no beginning of a file's name; add one, for example b/model"),
        ("--slow 0:1e30", "--slow 0:1e30: the factor must be 1 or more, and at most 1,000,000"),
        ("--stall 0.1:nan", "--stall 0.1:nan: the factor must be 1 or more, and at most 1,000,000"),
        ("--stall nan:2", "--stall nan:2: the probability must be between 0 and 1"),
    ],
)
def test_options_are_refused_with_flag_value_and_what_is_allowed(arguments: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        options_from(PARSER.parse_args(arguments.split()))
    assert said in str(caught.value)


@pytest.mark.parametrize("name", ["train_mnist", "train_cifar10", "train_imagenet", "dist_sync_mlp"])
def test_the_scripts_own_defaults_are_in_range(name: str) -> None:
    path = Path(__file__).parents[3] / "examples" / "image-classification" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"ranges_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    options_from(module.parser.parse_args([]))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--slow 1:3", "--slow and --stall multiply the seconds of --pace"),
        ("--stall 0.1:5", "--slow and --stall multiply the seconds of --pace"),
        ("--save-batches 5", "--save-batches 5 has nowhere to save: give --model-prefix, too"),
        ("--load-epoch 3 --resume auto --model-prefix m", "--load-epoch 3 and --resume auto both say where to go on"),
    ],
)
def test_what_would_do_nothing_is_refused(arguments: str, said: str) -> None:
    options = options_from(PARSER.parse_args(arguments.split()))
    with pytest.raises(UsageError, match=said):
        check(options, Job())
