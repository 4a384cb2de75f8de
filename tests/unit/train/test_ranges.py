"""The range of every numeric flag is checked: 0, -1, NaN, and a number that is too large."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from echelon.data.images.config import AugmentConfig
from echelon.errors import UsageError
from echelon.train.flags.check import RANGES, check_numbers
from echelon.train.script import make_parser

PARSER = make_parser(None)
AUGMENT = {field.name for field in dataclasses.fields(AugmentConfig)}

SWITCHES = {"test_io", "benchmark", "data_allocator", "push_factors", "use_imagenet_data_augmentation"}
ANY_WHOLE_NUMBER = {*SWITCHES, "save_period"}  # MXNet treats less than 1 as 1 there
SIZES = {"batch_size", "num_epochs", "num_layers", "num_classes", "num_examples", "num_val_examples"}
FROM_ONE = SIZES | {"disp_batches", "data_nthreads"}
ABOVE_ZERO = FROM_ONE | {"clip_gradient", "max_grad_norm"}
BELOW_ZERO = {"seed"}
HUGE_FLOATS = {"lr", "lr_factor", "wd", "warmup_epochs", "gc_threshold", "mixup", "clip_gradient", "max_grad_norm"}


def numeric(kind: type, *, augment: bool = False) -> list[str]:
    """Return the numeric flags: those of the augmentation, or all others."""
    return sorted(a.dest for a in PARSER._actions if a.type is kind and (a.dest in AUGMENT) == augment)


WHOLE = [name for name in numeric(int) if name not in ANY_WHOLE_NUMBER]
FLOATS = numeric(float)


def test_every_numeric_flag_has_a_range() -> None:
    assert {*WHOLE, *FLOATS} == RANGES.keys()


def error_for(name: str, value: float) -> str:
    """Return the error message, or "" if the value is valid."""
    try:
        check_numbers({name: value})
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", [*WHOLE, *FLOATS])
def test_zero_and_negative_numbers(name: str) -> None:
    kind = float if name in FLOATS else int
    assert bool(error_for(name, kind(0))) == (name in ABOVE_ZERO)
    assert bool(error_for(name, kind(-1))) == (name not in BELOW_ZERO)


@pytest.mark.parametrize("name", FLOATS)
def test_nan_and_infinity_are_rejected(name: str) -> None:
    flag = f"--{name.replace('_', '-')} must be "
    for value in (math.nan, math.inf, -math.inf):
        assert error_for(name, value).startswith(flag)
        assert error_for(name, value).endswith(f", not {value}")
    assert bool(error_for(name, 1e30)) == (name not in HUGE_FLOATS)


@pytest.mark.parametrize("name", WHOLE)
def test_a_count_that_is_too_large_is_rejected(name: str) -> None:
    assert error_for(name, 10**30).endswith(f", not {10**30}")
    for text in ("nan", "inf", "1e30"):
        with pytest.raises(UsageError, match=f"invalid int value: '{text}'"):
            PARSER.parse_args([f"--{name.replace('_', '-')}", text])


@pytest.mark.parametrize("name", numeric(float, augment=True))
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_augmentation_flags_must_be_finite(name: str, value: float) -> None:
    given: dict[str, Any] = {name: value}
    with pytest.raises(UsageError, match=f"{name} must be a finite number"):
        AugmentConfig(**given)
