"""Assertions that hold under `python -O` and without a test runner, and that show both values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def same(what: str, actual: object, expected: object) -> None:
    """Equal, or an AssertionError that shows both."""
    if actual != expected:
        raise AssertionError(f"{what}: got {_short(actual)}, expected {_short(expected)}")


def equal(what: str, actual: Tensor, expected: Tensor | float) -> None:
    """The same shape, dtype and bits; a number stands for a tensor full of it."""
    wanted = expected if isinstance(expected, Tensor) else torch.full_like(actual, expected)
    same(f"{what}: shape and dtype", (actual.shape, actual.dtype), (wanted.shape, wanted.dtype))
    if not torch.equal(actual, wanted):
        wrong = int((actual != wanted).sum())
        raise AssertionError(f"{what}: {wrong} of {actual.numel()} elements differ: got {actual}, expected {wanted}")


def raises(what: str, kind: type[Exception], words: tuple[str, ...], call: Callable[[], object]) -> None:
    """The call raises `kind`, and its message has all the words."""
    try:
        call()
    except kind as error:
        missing = [word for word in words if word not in str(error)]
        if missing:
            raise AssertionError(f"{what}: the error does not say {missing}: {error}") from error
    else:
        raise AssertionError(f"{what}: no {kind.__name__} was raised")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:100]} ... {text[-80:]} ({len(text)} characters)"
