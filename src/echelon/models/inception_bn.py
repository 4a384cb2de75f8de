"""Inception with batch norm: the ImageNet layout, its wider "full" variant, and the layout for 28x28 images.

`inception-bn` uses the small layout for heights up to 28 and the ImageNet layout above, as MXNet's command lines
expect. `inception-bn-28-small` is the small layout for any height. `inception-bn-full` has the widths of MXNet 0.7 for
21,841 classes, with the batch norm and pooling of the other layouts.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from echelon.models.layers import (
    Layer,
    Shape,
    avg_pool,
    chain,
    classifier,
    concat,
    conv_bn,
    max_pool,
    network,
    relu,
)

SMALL_HEIGHT = 28

# MXNet adds 1e-10 to exceed the smallest epsilon that cuDNN accepts.
_conv = partial(conv_bn, bias=True, eps=1e-5 + 1e-10, fix_gamma=False, activation=relu)


def _mix(one: int, red3: int, three: int, red33: int, double: int, pool: Layer, proj: int) -> Layer:
    return concat(
        _conv(one),
        chain(_conv(red3), _conv(three, 3, 1, 1)),
        chain(_conv(red33), _conv(double, 3, 1, 1), _conv(double, 3, 1, 1)),
        chain(pool, _conv(proj)),
    )


def _shrink(red3: int, three: int, red33: int, double: int) -> Layer:
    return concat(
        chain(_conv(red3), _conv(three, 3, 2, 1)),
        chain(_conv(red33), _conv(double, 3, 1, 1), _conv(double, 3, 2, 1)),
        max_pool(3, 2, 1),
    )


def _imagenet_layout(full: bool) -> Layer:
    average, maximum = avg_pool(3, 1, 1), max_pool(3, 1, 1)
    stem = (96, 128, 288) if full else (64, 64, 192)
    in3a = (96, 96, 96, 96, 144, average, 48) if full else (64, 64, 64, 64, 96, average, 32)
    in3b = (96, 96, 144, 96, 144, average, 96) if full else (64, 64, 96, 64, 96, average, 64)
    return chain(
        conv1=_conv(stem[0], 7, 2, 3),
        pool1=max_pool(3, 2),
        conv2red=_conv(stem[1]),
        conv2=_conv(stem[2], 3, 1, 1),
        pool2=max_pool(3, 2),
        in3a=_mix(*in3a),
        in3b=_mix(*in3b),
        in3c=_shrink(192, 240, 96, 144) if full else _shrink(128, 160, 64, 96),
        in4a=_mix(224, 64, 96, 96, 128, average, 128),
        in4b=_mix(192, 96, 128, 96, 128, average, 128),
        in4c=_mix(160, 128, 160, 128, 160, average, 128),
        in4d=_mix(96, 128, 192, 160, 96 if full else 192, average, 128),
        in4e=_shrink(128, 192, 192, 256),
        in5a=_mix(352, 192, 320, 160, 224, average, 128),
        in5b=_mix(352, 192, 320, 192, 224, maximum, 128),
        pool5=avg_pool(7),
    )


def _small_layout() -> Layer:
    def simple(one: int, three: int) -> Layer:
        return concat(_conv(one), _conv(three, 3, 1, 1))

    def down(three: int) -> Layer:
        return concat(_conv(three, 3, 2, 1), max_pool(3, 2, 1))

    return chain(
        conv1=_conv(96, 3, 1, 1),
        in3a=simple(32, 32),
        in3b=simple(32, 48),
        in3c=down(80),
        in4a=simple(112, 48),
        in4b=simple(96, 64),
        in4c=simple(80, 80),
        in4d=simple(48, 96),
        in4e=down(96),
        in5a=simple(176, 160),
        in5b=simple(176, 160),
        pool5=avg_pool(7),
    )


def inception_bn(*, num_classes: int, image_shape: Shape) -> nn.Module:
    if image_shape[1] <= SMALL_HEIGHT:
        return inception_bn_28_small(num_classes=num_classes, image_shape=image_shape)
    sizes = (
        f"Above a height of {SMALL_HEIGHT} inception-bn uses its ImageNet layout, designed for 224x224 images, which "
        "needs at least 205x205. For small images use 28x28, or inception-bn-28-small."
    )
    return network(_imagenet_layout(full=False), classifier(num_classes), image_shape, sizes=sizes)


def inception_bn_28_small(*, num_classes: int, image_shape: Shape) -> nn.Module:
    sizes = "The small layout of inception-bn is designed for 28x28 images and needs at least 25x25."
    return network(_small_layout(), classifier(num_classes), image_shape, sizes=sizes)


def inception_bn_full(*, num_classes: int, image_shape: Shape) -> nn.Module:
    sizes = "inception-bn-full is designed for 224x224 images and needs at least 205x205."
    return network(_imagenet_layout(full=True), classifier(num_classes), image_shape, sizes=sizes)
