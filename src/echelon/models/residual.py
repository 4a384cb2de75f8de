"""Depth and width of the stages that resnet, resnet-v1 and resnext share.

Images up to a family's `small_height` use three stages (the CIFAR layout), larger ones four (the ImageNet layout), and
each layout has its own depths. The stem is chosen separately: up to a height of 32 it is one 3x3 convolution. For
resnet and resnet-v1 `small_height` is 28, so a 32x32 image gets the small stem and the ImageNet stages. MXNet's command
lines rely on that, and the error for an unsupported depth explains it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from echelon.errors import UsageError
from echelon.models.layers import Layer, Shape, chain

IMAGENET_UNITS = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
    200: (3, 24, 36, 3),
    269: (3, 30, 48, 8),
}
_SMALL_STEM_HEIGHT = 32
_FIRST_SMALL_BOTTLENECK = 164


@dataclass(frozen=True)
class Plan:
    """The size of a residual network."""

    units: tuple[int, ...]  # residual units in each stage
    filters: tuple[int, ...]  # of each stage
    stem_filters: int
    bottleneck: bool
    small_stem: bool


# Makes one residual unit from (filters, stride, whether the shortcut is a projection).
UnitFactory = Callable[[int, int, bool], Layer]


def plan(network: str, num_layers: int | None, image_shape: Shape, *, small_height: int = 28) -> Plan:
    """Return the stages for a depth and an image. The default depth is 110 for small images, else 50."""
    height = image_shape[1]
    small_stem = height <= _SMALL_STEM_HEIGHT
    if height <= small_height:
        depth = 110 if num_layers is None else num_layers
        bottleneck = depth >= _FIRST_SMALL_BOTTLENECK
        units, rest = divmod(depth - 2, 9 if bottleneck else 6)
        if rest or units < 1:
            raise _unsupported_depth(network, depth, height, small_height)
        return Plan((units,) * 3, (64, 128, 256) if bottleneck else (16, 32, 64), 16, bottleneck, small_stem)
    depth = 50 if num_layers is None else num_layers
    if depth not in IMAGENET_UNITS:
        raise _unsupported_depth(network, depth, height, small_height)
    bottleneck = depth >= 50
    filters = (256, 512, 1024, 2048) if bottleneck else (64, 128, 256, 512)
    return Plan(IMAGENET_UNITS[depth], filters, 64, bottleneck, small_stem)


def _unsupported_depth(network: str, depth: int, height: int, small_height: int) -> UsageError:
    small = "8, 14, 20, ... 158 (6n+2) and 164, 173, 182, ... 1001 (9n+2)"
    large = ", ".join(map(str, IMAGENET_UNITS))
    valid, other = (small, large) if height <= small_height else (large, small)
    where = "over" if height <= small_height else "up to"
    return UsageError(
        f"{network} does not exist with {depth} layers for images of height {height}; choose from {valid}. "
        f"Images of height {where} {small_height} use another layout, with {other}."
    )


def stages(chosen: Plan, unit: UnitFactory) -> Layer:
    """Return all stages. The first unit of each has a projection and, from the second stage on, halves the image."""
    steps = {}
    for stage, (count, filters) in enumerate(zip(chosen.units, chosen.filters, strict=True), start=1):
        units = {"unit1": unit(filters, 1 if stage == 1 else 2, True)}
        units |= {f"unit{index}": unit(filters, 1, False) for index in range(2, count + 1)}
        steps[f"stage{stage}"] = chain(**units)
    return chain(**steps)
