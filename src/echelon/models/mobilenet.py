"""MobileNet v1 and v2: depthwise convolutions combined with 1x1 convolutions."""

from __future__ import annotations

from functools import partial

from torch import nn

from echelon.errors import UsageError
from echelon.models.layers import (
    Built,
    Layer,
    Shape,
    avg_pool,
    chain,
    classifier,
    conv_bn,
    each,
    global_avg_pool,
    network,
    relu,
    residual,
)

# (stride of the depthwise convolution, filters of the 1x1 after it)
_V1 = ((1, 64), (2, 128), (1, 128), (2, 256), (1, 256), (2, 512), *[(1, 512)] * 5, (2, 1024), (1, 1024))
# (expansion, filters, units, stride of the first)
_V2 = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


def _relu6() -> Layer:
    return each(lambda: nn.ReLU6(inplace=True))


_conv1 = partial(conv_bn, activation=relu)
_linear2 = partial(conv_bn, eps=1e-5, fix_gamma=False)
_conv2 = partial(_linear2, activation=_relu6)


def _scaled(filters: int, factor: float) -> int:
    if factor <= 0:
        raise UsageError(f"The width factor of a mobilenet must be above 0, not {factor}.")
    return max(int(filters * factor), 1)


def _separable(stride: int, filters: int) -> Layer:
    def make(shape: Shape) -> Built:
        channels = shape[0]
        return chain(dw=_conv1(channels, 3, stride, 1, groups=channels), pw=_conv1(filters))(shape)

    return make


def mobilenet(*, num_classes: int, image_shape: Shape, alpha: float = 1.0) -> nn.Module:
    units = [_separable(stride, _scaled(filters, alpha)) for stride, filters in _V1]
    features = chain(conv1=_conv1(_scaled(32, alpha), 3, 2, 1), units=chain(*units), pool=avg_pool(7))
    sizes = "mobilenet is designed for 224x224 images and needs at least 193x193."
    return network(features, classifier(num_classes), image_shape, sizes=sizes)


def _inverted(expansion: int, filters: int, stride: int, adds: bool) -> Layer:
    def make(shape: Shape) -> Built:
        wide = shape[0] * expansion
        body = chain(expand=_conv2(wide), dw=_conv2(wide, 3, stride, 1, groups=wide), project=_linear2(filters))
        return (residual(body) if adds else body)(shape)

    return make


def mobilenetv2(*, num_classes: int, image_shape: Shape, multiplier: float = 1.0) -> nn.Module:
    units = [
        _inverted(expansion, _scaled(filters, multiplier), 1 if index else stride, adds=index > 0)
        for expansion, filters, count, stride in _V2
        for index in range(count)
    ]
    features = chain(
        conv1=_conv2(_scaled(32, multiplier), 3, 2, 1),
        units=chain(*units),
        last=_conv2(_scaled(1280, max(multiplier, 1.0))),
        pool=global_avg_pool(),
    )
    return network(features, classifier(num_classes), image_shape)
