"""The layers that all families of networks are built from.

A `Layer` is a function that takes the shape of one input image and returns (module, output shape). `chain`, `concat`
and `residual` combine layers; `network` adds the classifier and builds all modules. The result consists of plain torch
modules only. Because shapes are computed while building, an image that is too small for a layer is reported without
running the network.

Batch norm follows MXNet: its momentum 0.9 is 0.1 in torch, and with `fix_gamma` the scale stays 1 and is not trained.
A fixed scale is still a parameter (with `requires_grad` off), because MXNet's files and parameter counts contain it.
Convolutions and pooling round the output size down, and average pooling includes the padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from echelon.errors import UsageError

Shape = tuple[int, int, int]  # channels, height, width
Size = int | tuple[int, int]
Built = tuple[nn.Module, Shape]
Layer = Callable[[Shape], Built]


class TooSmallError(Exception):
    """A window is larger than its input. `network` converts it to a UsageError."""


class BatchNorm(nn.BatchNorm2d):
    """torch's batch norm without the count of batches, which nothing reads and which costs one kernel per layer.

    A single value per channel (one image of 1x1 in the batch) is normalised as in MXNet; torch rejects it.
    """

    def forward(self, x: Tensor) -> Tensor:
        assert self.momentum is not None
        if self.training and x.numel() == x.shape[1]:
            return self._normalise_one(x, self.momentum)
        return functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps
        )

    def _normalise_one(self, x: Tensor, momentum: float) -> Tensor:
        """Normalise one value per channel to 0. torch would multiply the variance by n / (n - 1), which gives NaN."""
        assert self.running_mean is not None
        assert self.running_var is not None
        with torch.no_grad():
            self.running_mean.lerp_(x.flatten().to(self.running_mean.dtype), momentum)
            self.running_var.mul_(1 - momentum)
        scale, shift = self.weight.reshape(1, -1, 1, 1), self.bias.reshape(1, -1, 1, 1)
        return ((x - x) * scale + shift).to(x.dtype)


class Concat(nn.Module):
    """Runs branches on the same input and concatenates their outputs along the channels."""

    def __init__(self, branches: list[nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


class Residual(nn.Module):
    """Returns shortcut(x) + scale * body(x)."""

    def __init__(self, body: nn.Module, shortcut: nn.Module, scale: float) -> None:
        super().__init__()
        self.body, self.shortcut, self.scale = body, shortcut, scale

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        shortcut: Tensor = self.shortcut(x)
        return shortcut + (y if self.scale == 1.0 else y * self.scale)


def chain(*layers: Layer, **named: Layer) -> Layer:
    """Run layers one after the other; the module of a layer given by keyword gets that name."""
    steps = {str(index): layer for index, layer in enumerate(layers)} | named

    def make(shape: Shape) -> Built:
        sequence = nn.Sequential()
        for name, layer in steps.items():
            module, shape = layer(shape)
            sequence.add_module(name, module)
        return sequence, shape

    return make


def concat(*branches: Layer) -> Layer:
    """Run branches on the same input and concatenate their channels."""

    def make(shape: Shape) -> Built:
        built = [branch(shape) for branch in branches]
        _, height, width = built[0][1]
        return Concat([module for module, _ in built]), (sum(out[0] for _, out in built), height, width)

    return make


def residual(body: Layer, shortcut: Layer | None = None, scale: float = 1.0) -> Layer:
    """Add the input, or `shortcut` of it, to `scale` times the output of `body`."""

    def make(shape: Shape) -> Built:
        module, out = body(shape)
        return Residual(module, shortcut(shape)[0] if shortcut else nn.Identity(), scale), out

    return make


def each(factory: Callable[[], nn.Module]) -> Layer:
    """Return a layer that does not change the shape."""
    return lambda shape: (factory(), shape)


def _pair(size: Size) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def _output_shape(shape: Shape, filters: int, kernel: Size, stride: int, padding: Size) -> Shape:
    """Return the output shape of a sliding window over the padded image, rounded down."""
    (k_high, k_wide), (p_high, p_wide) = _pair(kernel), _pair(padding)
    _, height, width = shape
    room_high, room_wide = height + 2 * p_high - k_high, width + 2 * p_wide - k_wide
    if min(room_high, room_wide) < 0:
        raise TooSmallError(f"a window of {k_high}x{k_wide} does not fit into {height}x{width}")
    return filters, room_high // stride + 1, room_wide // stride + 1


def conv(
    filters: int, kernel: Size = 1, stride: int = 1, padding: Size = 0, *, groups: int = 1, bias: bool = True
) -> Layer:
    def make(shape: Shape) -> Built:
        module = nn.Conv2d(shape[0], filters, kernel, stride, padding, groups=groups, bias=bias)
        return module, _output_shape(shape, filters, kernel, stride, padding)

    return make


def batch_norm(eps: float = 1e-3, fix_gamma: bool = True) -> Layer:
    def make(shape: Shape) -> Built:
        norm = BatchNorm(shape[0], eps=eps, momentum=0.1)
        norm.weight.requires_grad_(not fix_gamma)
        return norm, shape

    return make


def relu() -> Layer:
    return each(lambda: nn.ReLU(inplace=True))


def conv_relu(filters: int, kernel: Size = 1, stride: int = 1, padding: Size = 0) -> Layer:
    return chain(conv=conv(filters, kernel, stride, padding), relu=relu())


def conv_bn(
    filters: int,
    kernel: Size = 1,
    stride: int = 1,
    padding: Size = 0,
    *,
    groups: int = 1,
    bias: bool = False,
    eps: float = 1e-3,
    fix_gamma: bool = True,
    activation: Callable[[], Layer] | None = None,
) -> Layer:
    """Return a convolution, batch norm, and the activation if one is given."""
    unit = {"conv": conv(filters, kernel, stride, padding, groups=groups, bias=bias), "bn": batch_norm(eps, fix_gamma)}
    return chain(**unit) if activation is None else chain(**unit, act=activation())


def max_pool(kernel: int, stride: int, padding: int = 0) -> Layer:
    return lambda shape: (
        nn.MaxPool2d(kernel, stride, padding),
        _output_shape(shape, shape[0], kernel, stride, padding),
    )


def avg_pool(kernel: int, stride: int = 1, padding: int = 0) -> Layer:
    return lambda shape: (
        nn.AvgPool2d(kernel, stride, padding),
        _output_shape(shape, shape[0], kernel, stride, padding),
    )


def global_avg_pool() -> Layer:
    return lambda shape: (nn.AdaptiveAvgPool2d(1), (shape[0], 1, 1))


def flatten() -> Layer:
    return lambda shape: (nn.Flatten(), (math.prod(shape), 1, 1))


def dropout(probability: float) -> Layer:
    return each(lambda: nn.Dropout(probability))


def linear(units: int) -> Layer:
    return lambda shape: (nn.Linear(math.prod(shape), units), (units, 1, 1))


def network(features: Layer, head: Layer, image_shape: Shape, *, sizes: str = "") -> nn.Module:
    """Build the whole network. `sizes` is added to the error for images that are too small."""
    try:
        return chain(features=features, classifier=head)(image_shape)[0]
    except TooSmallError as error:
        given = ",".join(map(str, image_shape))
        raise UsageError(f"Image shape {given} is too small: {error}. {sizes}") from error


def classifier(
    num_classes: int, hidden: tuple[int, ...] = (), activation: Callable[[], nn.Module] = nn.ReLU, drop: float = 0.0
) -> Layer:
    """Return fully connected layers: the hidden ones with activation and dropout, then one output per class."""
    steps = {"flatten": flatten()}
    for index, units in enumerate(hidden, start=1):
        steps |= {f"fc{index}": linear(units), f"act{index}": each(activation)}
        if drop:
            steps[f"drop{index}"] = dropout(drop)
    return chain(**steps, fc=linear(num_classes))
