"""The tensors that a benchmark moves: the gradient shapes of known models, in the order of their `parameters()`.

The shapes are computed without building a model, so this module needs no torch. The counts are those of the published
networks for ImageNet: `resnet50` has 161 tensors and 25,557,032 elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import prod

from echelon.errors import UsageError, unknown_name

Shape = tuple[int, ...]

DEFAULT_KEY_SIZE = 256
"""Elements per key of `keys:N`: 1 kB of float32, so that the fixed cost of a key dominates that of its bytes."""


def shapes(name: str) -> list[Shape]:
    """Return the shapes of a model by name, or those of N equal keys for `keys:N` or `keys:N:SIZE` (in elements)."""
    if name.startswith("keys:"):
        return _equal_keys(name)
    if name not in MODELS:
        raise unknown_name("model", name, [*MODELS, "keys:N", "keys:N:SIZE"])
    return list(MODELS[name]())


def num_elements(all_shapes: Sequence[Shape]) -> int:
    """Return the number of elements of all tensors together."""
    return sum(prod(shape) for shape in all_shapes)


def _equal_keys(name: str) -> list[Shape]:
    fields = name.split(":")[1:]
    if len(fields) > 2 or not all(field.isdigit() and int(field) > 0 for field in fields):
        raise UsageError(f"{name!r} is not keys:N or keys:N:SIZE with whole numbers above 0, as in keys:100:256")
    count, size = [int(field) for field in [*fields, str(DEFAULT_KEY_SIZE)]][:2]
    return [(size,)] * count


def _conv(inputs: int, outputs: int, kernel: int) -> Iterator[Shape]:
    """Yield a convolution without bias, and the weight and bias of its batch norm."""
    yield (outputs, inputs, kernel, kernel)
    yield (outputs,)
    yield (outputs,)


def _linear(widths: Sequence[int]) -> Iterator[Shape]:
    for inputs, outputs in pairwise(widths):
        yield (outputs, inputs)
        yield (outputs,)


def _resnet50() -> Iterator[Shape]:
    return _resnet((3, 4, 6, 3), kernels=(1, 3, 1), expansion=4)


def _resnet18() -> Iterator[Shape]:
    return _resnet((2, 2, 2, 2), kernels=(3, 3), expansion=1)


def _resnet(depths: Sequence[int], kernels: Sequence[int], expansion: int) -> Iterator[Shape]:
    yield from _conv(3, 64, 7)
    inputs = 64
    for stage, depth in enumerate(depths):
        width = 64 << stage
        outputs = width * expansion
        for _ in range(depth):
            yield from _block(inputs, width, outputs, kernels)
            inputs = outputs
    yield from _linear([inputs, 1000])


def _block(inputs: int, width: int, outputs: int, kernels: Sequence[int]) -> Iterator[Shape]:
    """Yield the residual branch, then the projection of the shortcut if the width changes."""
    widths = [inputs, *[width] * (len(kernels) - 1), outputs]
    for (before, after), kernel in zip(pairwise(widths), kernels, strict=True):
        yield from _conv(before, after, kernel)
    if inputs != outputs:
        yield from _conv(inputs, outputs, 1)


def _vgg16() -> Iterator[Shape]:
    inputs = 3
    for depth, outputs in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
        for _ in range(depth):
            yield (outputs, inputs, 3, 3)
            yield (outputs,)
            inputs = outputs
    yield from _linear([512 * 7 * 7, 4096, 4096, 1000])


def _mlp() -> Iterator[Shape]:
    """Return the network of the digits example: 28×28 pixels, layers of 128 and 64, ten classes."""
    return _linear([28 * 28, 128, 64, 10])


MODELS: dict[str, Callable[[], Iterator[Shape]]] = {
    "resnet50": _resnet50,
    "resnet18": _resnet18,
    "vgg16": _vgg16,
    "mlp": _mlp,
}
