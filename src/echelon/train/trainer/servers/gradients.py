"""Gradients that notice when the loop changes them.

A gradient that was sent during backward cannot be changed any more: the change would have no effect. A gradient of one
worker among several may be changed, but a change such as clipping then acts on a part of the sum and not on the sum. In
both cases the loop must be told. `WatchedGradient` sees every in-place operation that is called from Python, also
through views and through `.data`, on every dtype and device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

OnWrite = Callable[["Write"], None]

_NOT_WRITES = {"requires_grad_", "detach_", "__setstate__"}
_AUGMENTED = {f"__i{name}__" for name in ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "and", "or")}
_SCALING = {"mul_", "div_", "true_divide_", "multiply_", "divide_", "__imul__", "__itruediv__", "__idiv__"}
_SCALING_MANY = {"_foreach_mul_", "_foreach_div_"}
_UNSCALING = "_amp_foreach_non_finite_check_and_unscale_"  # GradScaler's


class Write:
    """An in-place operation on a gradient."""

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        self.name = name
        others = args[1:]
        numbers = bool(others) and all(_is_number(other) for other in others)
        self.is_scaling = name == _UNSCALING or (name in _SCALING | _SCALING_MANY and numbers)
        self.is_zeroing = name in ("zero_", "_foreach_zero_")


class WatchedGradient(Tensor):
    """A gradient that reports each write before it happens; the report may raise."""

    _on_write: OnWrite

    @classmethod
    def of(cls, gradient: Tensor, on_write: OnWrite) -> Self:
        """Return the same memory as a watched gradient."""
        watched = gradient.as_subclass(cls)
        watched._on_write = on_write
        return watched

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = memo[id(self)] = self.as_subclass(Tensor).clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        for gradient in _written(name, args, kwargs):
            gradient._on_write(Write(name, args))
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        source = next((one for one in args if isinstance(one, WatchedGradient)), None)
        return result if source is None else _watched_views(result, source)


def _written(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[WatchedGradient]:
    """Return the watched gradients that an operation writes to."""
    in_place = (name.endswith("_") and not name.endswith("__")) or name in _AUGMENTED or name == "__setitem__"
    targets: list[Any] = []
    if in_place and name not in _NOT_WRITES and args:
        targets += args[0] if isinstance(args[0], list | tuple) else [args[0]]
    if (out := kwargs.get("out")) is not None:
        targets += out if isinstance(out, list | tuple) else [out]
    return [target for target in targets if isinstance(target, WatchedGradient)]


def _watched_views(result: Any, source: WatchedGradient) -> Any:
    """Watch what shares the gradient's memory, too."""
    if isinstance(result, np.ndarray):
        result.flags.writeable = False
        return result
    if isinstance(result, list | tuple) and all(isinstance(one, Tensor) for one in result):
        return type(result)(_watched_views(one, source) for one in result) if type(result) in (list, tuple) else result
    if type(result) is Tensor and not result.requires_grad and _memory(result) == _memory(source):
        return WatchedGradient.of(result, source._on_write)
    return result


def _memory(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return 0 if tensor.is_sparse else tensor.untyped_storage().data_ptr()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) or (isinstance(value, list | tuple) and all(map(_is_number, value)))
