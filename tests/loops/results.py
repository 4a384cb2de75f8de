"""What a loop returned, as a flat dict of plain values that can be sent and compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from loops.loop import Result

Flat = dict[str, Tensor | str]


def flatten(result: Result) -> Flat:
    """Return the tensors, numbers and texts of a result by their paths. Tensors are copied, to the CPU."""
    return dict(_walk("", result))


def _walk(path: str, value: Result) -> Iterator[tuple[str, Tensor | str]]:
    match value:
        case None | str():
            yield path, str(value)
        case Tensor():
            dense = value.detach().to_dense() if value.is_sparse else value.detach()
            yield path, dense.to("cpu", copy=True)
        case bool() | int() | float():
            yield path, torch.tensor(value, dtype=torch.float64, device="cpu")
        case nn.Module() | Optimizer():
            yield from _walk(path, value.state_dict())
        case Mapping():
            for key, inner in value.items():
                yield from _walk(f"{path}.{key}" if path else str(key), inner)
        case Sequence():
            for index, inner in enumerate(value):
                yield from _walk(f"{path}[{index}]", inner)
        case _:
            raise TypeError(f"{path}: a loop returns models, optimizers, tensors, numbers and texts, not {value!r}")


def differences(actual: Flat, expected: Flat, tolerance: float = 0.0) -> list[str]:
    """Return one line for each value that differs: in one bit, or by more than the tolerance times its size."""
    lines = [f"{path}: is missing" for path in expected.keys() - actual.keys()]
    lines += [f"{path}: is not in the reference" for path in actual.keys() - expected.keys()]
    for path in (path for path in expected if path in actual):
        if line := _difference(actual[path], expected[path], tolerance):
            lines.append(f"{path}: {line}")
    return lines


def _difference(actual: Tensor | str, expected: Tensor | str, tolerance: float) -> str | None:
    if isinstance(actual, str) or isinstance(expected, str):
        return None if actual == expected else f"{actual!r} instead of {expected!r}"
    if tolerance and not expected.ndim:  # Adam's step: a server creates it in the default dtype of its own process
        expected = expected.to(actual.dtype)
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return f"{actual.dtype} {list(actual.shape)} instead of {expected.dtype} {list(expected.shape)}"
    if tolerance == 0.0:
        same = torch.equal(_bits(actual), _bits(expected))
        return None if same else f"differs in its bits: {_show(actual)} instead of {_show(expected)}"
    if not expected.numel():
        return None
    wide = torch.complex128 if expected.is_complex() else torch.float64
    gap = (actual.to(wide) - expected.to(wide)).abs().max()
    limit = tolerance * max(1.0, float(expected.to(wide).abs().max()))
    return None if gap <= limit else f"differs by {gap:.3g}, more than {limit:.3g}"  # NaN differs, too


def _bits(value: Tensor) -> Tensor:
    """Return the bytes of a tensor: NaN equals NaN, and -0 is not 0."""
    return value.contiguous().flatten().view(torch.uint8) if value.numel() else value


def _show(value: Tensor) -> str:
    return str(value.flatten()[:4].tolist())
