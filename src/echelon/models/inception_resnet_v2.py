"""Inception-ResNet v2: inception branches that are scaled down and added to their input.

The 129 filters and the uneven padding of `_block17` come from MXNet and are needed to load its checkpoints.
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
    dropout,
    global_avg_pool,
    max_pool,
    network,
    relu,
    residual,
)

_SIZES = "inception-resnet-v2 is designed for 299x299 images and needs at least 75x75."

_linear = partial(conv_bn, bias=True)
_conv = partial(_linear, activation=relu)


def _mixed() -> Layer:
    return concat(
        _conv(96),
        chain(_conv(48), _conv(64, 5, 1, 2)),
        chain(_conv(64), _conv(96, 3, 1, 1), _conv(96, 3, 1, 1)),
        chain(avg_pool(3, 1, 1), _conv(64)),
    )


def _block35() -> Layer:
    branches = concat(
        _conv(32),
        chain(_conv(32), _conv(32, 3, 1, 1)),
        chain(_conv(32), _conv(48, 3, 1, 1), _conv(64, 3, 1, 1)),
    )
    return chain(sum=residual(chain(mix=branches, out=_linear(320)), scale=0.17), relu=relu())


def _block17() -> Layer:
    branches = concat(_conv(192), chain(_conv(129), _conv(160, (1, 7), 1, (1, 2)), _conv(192, (7, 1), 1, (2, 1))))
    return chain(sum=residual(chain(mix=branches, out=_linear(1088)), scale=0.1), relu=relu())


def _block8(scale: float = 0.2) -> Layer:
    branches = concat(_conv(192), chain(_conv(192), _conv(224, (1, 3), 1, (0, 1)), _conv(256, (3, 1), 1, (1, 0))))
    return residual(chain(mix=branches, out=_linear(2080)), scale=scale)


def _reduce_a() -> Layer:
    return concat(_conv(384, 3, 2), chain(_conv(256), _conv(256, 3, 1, 1), _conv(384, 3, 2)), max_pool(3, 2))


def _reduce_b() -> Layer:
    return concat(
        chain(_conv(256), _conv(384, 3, 2)),
        chain(_conv(256), _conv(288, 3, 2)),
        chain(_conv(256), _conv(288, 3, 1, 1), _conv(320, 3, 2)),
        max_pool(3, 2),
    )


def inception_resnet_v2(*, num_classes: int, image_shape: Shape) -> nn.Module:
    features = chain(
        conv1=_conv(32, 3, 2),
        conv2=_conv(32, 3),
        conv3=_conv(64, 3, 1, 1),
        pool3=max_pool(3, 2),
        conv4=_conv(80),
        conv5=_conv(192, 3),
        pool5=max_pool(3, 2),
        mixed=_mixed(),
        block35=chain(*[_block35() for _ in range(10)]),
        reduce_a=_reduce_a(),
        block17=chain(*[_block17() for _ in range(20)]),
        reduce_b=_reduce_b(),
        block8=chain(*[chain(sum=_block8(), relu=relu()) for _ in range(9)]),
        block8_last=_block8(scale=1.0),
        conv6=_conv(1536),
        pool6=global_avg_pool(),
        drop=dropout(0.2),
    )
    return network(features, classifier(num_classes), image_shape, sizes=_SIZES)
