"""Residual networks: resnet (v2), resnet-v1, resnet-28-small and resnext.

Images up to a family's `small_height` use three stages (the CIFAR layout), larger ones four (the ImageNet layout), and
each layout has its own depths. The stem is chosen separately: up to a height of 32 it is one 3x3 convolution. For
resnet and resnet-v1 `small_height` is 28, so a 32x32 image gets the small stem and the ImageNet stages. MXNet's command
lines rely on that, and the error for an unsupported depth explains it. For resnext it is 32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from echelon.errors import UsageError
from echelon.models.layers import (
    Built,
    Layer,
    Shape,
    batch_norm,
    chain,
    classifier,
    conv,
    conv_bn,
    global_avg_pool,
    max_pool,
    network,
    relu,
    residual,
)

_IMAGENET_UNITS = {
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
_SMALL_HEIGHT, _SMALL_HEIGHT_RESNEXT = 28, 32
_EPS = 2e-5

_conv = partial(conv, bias=False)
_conv_bn = partial(conv_bn, eps=_EPS, fix_gamma=False)
_conv_bn_relu = partial(_conv_bn, activation=relu)


@dataclass(frozen=True)
class _Plan:
    """The size of a residual network."""

    units: tuple[int, ...]  # residual units in each stage
    filters: tuple[int, ...]  # of each stage
    stem_filters: int
    bottleneck: bool
    small_stem: bool


# Makes one residual unit from (filters, stride, whether the shortcut is a projection).
_UnitFactory = Callable[[int, int, bool], Layer]


def _plan(network: str, num_layers: int | None, image_shape: Shape, *, small_height: int = _SMALL_HEIGHT) -> _Plan:
    """Return the stages for a depth and an image. The default depth is 110 for small images, else 50."""
    height = image_shape[1]
    small_stem = height <= _SMALL_STEM_HEIGHT
    if height <= small_height:
        depth = 110 if num_layers is None else num_layers
        bottleneck = depth >= _FIRST_SMALL_BOTTLENECK
        units, rest = divmod(depth - 2, 9 if bottleneck else 6)
        if rest or units < 1:
            raise _unsupported_depth(network, depth, height, small_height)
        return _Plan((units,) * 3, (64, 128, 256) if bottleneck else (16, 32, 64), 16, bottleneck, small_stem)
    depth = 50 if num_layers is None else num_layers
    if depth not in _IMAGENET_UNITS:
        raise _unsupported_depth(network, depth, height, small_height)
    bottleneck = depth >= 50
    filters = (256, 512, 1024, 2048) if bottleneck else (64, 128, 256, 512)
    return _Plan(_IMAGENET_UNITS[depth], filters, 64, bottleneck, small_stem)


def _unsupported_depth(network: str, depth: int, height: int, small_height: int) -> UsageError:
    small = "8, 14, 20, ... 158 (6n+2) and 164, 173, 182, ... 1001 (9n+2)"
    large = ", ".join(map(str, _IMAGENET_UNITS))
    valid, other = (small, large) if height <= small_height else (large, small)
    where = "over" if height <= small_height else "up to"
    return UsageError(
        f"{network} does not exist with {depth} layers for images of height {height}; choose from {valid}. "
        f"Images of height {where} {small_height} use another layout, with {other}."
    )


def _stages(chosen: _Plan, unit: _UnitFactory) -> Layer:
    """Return all stages. The first unit of each has a projection and, from the second stage on, halves the image."""
    steps = {}
    for stage, (count, filters) in enumerate(zip(chosen.units, chosen.filters, strict=True), start=1):
        units = {"unit1": unit(filters, 1 if stage == 1 else 2, True)}
        units |= {f"unit{index}": unit(filters, 1, False) for index in range(2, count + 1)}
        steps[f"stage{stage}"] = chain(**units)
    return chain(**steps)


def _bn_relu() -> Layer:
    return chain(bn=batch_norm(_EPS, fix_gamma=False), relu=relu())


class PreActivationUnit(nn.Module):
    """Returns body(a) + x with a = relu(bn(x)); a unit with a projection adds shortcut(a) instead of x."""

    def __init__(self, activate: nn.Module, body: nn.Module, shortcut: nn.Module | None) -> None:
        super().__init__()
        self.activate, self.body, self.shortcut = activate, body, shortcut

    def forward(self, x: Tensor) -> Tensor:
        a = self.activate(x)
        y: Tensor = self.body(a)
        return y + (x if self.shortcut is None else self.shortcut(a))


def _v2_unit(filters: int, stride: int, projects: bool, *, bottleneck: bool) -> Layer:
    if bottleneck:
        body = chain(
            conv1=_conv(filters // 4),
            norm2=_bn_relu(),
            conv2=_conv(filters // 4, 3, stride, 1),
            norm3=_bn_relu(),
            conv3=_conv(filters),
        )
    else:
        body = chain(conv1=_conv(filters, 3, stride, 1), norm2=_bn_relu(), conv2=_conv(filters, 3, 1, 1))

    def make(shape: Shape) -> Built:
        module, out = body(shape)
        shortcut = _conv(filters, 1, stride)(shape)[0] if projects else None
        return PreActivationUnit(_bn_relu()(shape)[0], module, shortcut), out

    return make


def _v2_stem(chosen: _Plan) -> Layer:
    if chosen.small_stem:
        return chain(conv0=_conv(chosen.stem_filters, 3, 1, 1))
    return chain(conv0=_conv(chosen.stem_filters, 7, 2, 3), norm0=_bn_relu(), pool0=max_pool(3, 2, 1))


def resnet(*, num_classes: int, image_shape: Shape, num_layers: int | None = None) -> nn.Module:
    """Build ResNet v2: batch norm and relu come before each convolution, and nothing follows the sum."""
    chosen = _plan("resnet", num_layers, image_shape)
    features = chain(
        bn_data=batch_norm(_EPS, fix_gamma=True),
        stem=_v2_stem(chosen),
        stages=_stages(chosen, partial(_v2_unit, bottleneck=chosen.bottleneck)),
        norm1=_bn_relu(),
        pool1=global_avg_pool(),
    )
    return network(features, classifier(num_classes), image_shape)


def _add_relu(body: Layer, filters: int, stride: int, projects: bool) -> Layer:
    """Return the residual unit around `body`. The shortcut is the identity, or a 1x1 convolution with batch norm."""
    return chain(sum=residual(body, _conv_bn(filters, 1, stride) if projects else None), relu=relu())


def _v1_basic(filters: int, stride: int, projects: bool) -> Layer:
    body = chain(conv1=_conv_bn_relu(filters, 3, stride, 1), conv2=_conv_bn(filters, 3, 1, 1))
    return _add_relu(body, filters, stride, projects)


def _v1_bottleneck(filters: int, stride: int, projects: bool) -> Layer:
    body = chain(
        conv1=_conv_bn_relu(filters // 4, 1, stride),
        conv2=_conv_bn_relu(filters // 4, 3, 1, 1),
        conv3=_conv_bn(filters),
    )
    return _add_relu(body, filters, stride, projects)


def _v1_stem(chosen: _Plan, small: Callable[[int, int, int, int], Layer]) -> Layer:
    if chosen.small_stem:
        return chain(conv0=small(chosen.stem_filters, 3, 1, 1))
    return chain(conv0=_conv_bn_relu(chosen.stem_filters, 7, 2, 3), pool0=max_pool(3, 2, 1))


def resnet_v1(*, num_classes: int, image_shape: Shape, num_layers: int | None = None) -> nn.Module:
    """Build ResNet v1: batch norm after each convolution, relu after the sum, a bottleneck's stride in the first."""
    chosen = _plan("resnet-v1", num_layers, image_shape)
    features = chain(
        stem=_v1_stem(chosen, _conv_bn),  # MXNet has no relu in the small stem
        stages=_stages(chosen, _v1_bottleneck if chosen.bottleneck else _v1_basic),
        pool1=global_avg_pool(),
    )
    return network(features, classifier(num_classes), image_shape)


def resnet_28_small(*, num_classes: int, image_shape: Shape) -> nn.Module:
    """Build MXNet 0.7's network of 20 layers: default batch norm, biases, no projection in the first stage."""
    old = partial(conv_bn, bias=True)

    def block(filters: int, stride: int) -> Layer:
        body = chain(conv1=old(filters, 3, stride, 1, activation=relu), conv2=old(filters, 3, 1, 1))
        return chain(sum=residual(body, old(filters, 1, stride) if stride > 1 else None), relu=relu())

    features = chain(
        conv0=old(16, 3, 1, 1, activation=relu),
        stage1=chain(*[block(16, 1) for _ in range(3)]),
        stage2=chain(*[block(32, 1 if index else 2) for index in range(3)]),
        stage3=chain(*[block(64, 1 if index else 2) for index in range(3)]),
        pool=global_avg_pool(),
    )
    return network(features, classifier(num_classes), image_shape)


def _grouped_bottleneck(filters: int, stride: int, projects: bool, *, num_group: int) -> Layer:
    body = chain(
        conv1=_conv_bn_relu(filters // 2),
        conv2=_conv_bn_relu(filters // 2, 3, stride, 1, groups=num_group),
        conv3=_conv_bn(filters),
    )
    return _add_relu(body, filters, stride, projects)


def resnext(*, num_classes: int, image_shape: Shape, num_layers: int | None = None, num_group: int = 32) -> nn.Module:
    """Build ResNeXt: ResNet v1 with grouped convolutions in bottlenecks that are half as wide as their output."""
    chosen = _plan("resnext", num_layers, image_shape, small_height=_SMALL_HEIGHT_RESNEXT)
    narrowest = chosen.filters[0] // 2
    if chosen.bottleneck and (num_group < 1 or narrowest % num_group):
        raise UsageError(f"resnext cannot divide {narrowest} channels into num_group={num_group} equal groups.")
    features = chain(
        bn_data=batch_norm(_EPS, fix_gamma=True),
        stem=_v1_stem(chosen, _conv),
        stages=_stages(chosen, partial(_grouped_bottleneck, num_group=num_group) if chosen.bottleneck else _v1_basic),
        pool1=global_avg_pool(),
    )
    return network(features, classifier(num_classes), image_shape)
