"""Assertions that show both values. They also work under `python -O` and without a test runner."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def assert_equal(what: str, actual: object, expected: object) -> None:
    """Raise AssertionError if the values differ."""
    if actual != expected:
        raise AssertionError(f"{what}: got {_short(actual)}, expected {_short(expected)}")


def assert_tensor(what: str, actual: Tensor, expected: Tensor | float) -> None:
    """Raise AssertionError unless shape, dtype and bits are equal. A number stands for a tensor filled with it."""
    wanted = expected if isinstance(expected, Tensor) else torch.full_like(actual, expected)
    assert_equal(f"{what}: shape and dtype", (actual.shape, actual.dtype), (wanted.shape, wanted.dtype))
    if not torch.equal(actual, wanted):
        wrong = int((actual != wanted).sum())
        raise AssertionError(f"{what}: {wrong} of {actual.numel()} elements differ: got {actual}, expected {wanted}")


def assert_raises(what: str, kind: type[Exception], words: tuple[str, ...], call: Callable[[], object]) -> None:
    """Raise AssertionError unless the call raises `kind` with a message that contains all words."""
    try:
        call()
    except kind as error:
        missing = [word for word in words if word not in str(error)]
        if missing:
            raise AssertionError(f"{what}: the error message lacks {missing}: {error}") from error
    else:
        raise AssertionError(f"{what}: no {kind.__name__} was raised")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:100]} ... {text[-80:]} ({len(text)} characters)"
