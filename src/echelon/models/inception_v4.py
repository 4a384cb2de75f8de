"""Inception v4, for 299x299 images.

MXNet's final 8x8 average pooling has stride 1 and padding 1, so an 8x8 map becomes 3x3 and the classifier gets 13,824
features. That makes 55 million parameters; global average pooling would make 43 million. It is kept because MXNet's
checkpoints have that shape.
"""

from __future__ import annotations

from torch import nn

from echelon.models.inception_v3 import column, row, unit
from echelon.models.layers import Layer, Shape, avg_pool, chain, classifier, concat, dropout, max_pool, network

_SIZES = "inception-v4 is designed for 299x299 images and needs at least 235x235."


def _stem() -> Layer:
    return chain(
        conv1=unit(32, 3, 2),
        conv2=unit(32, 3),
        conv3=unit(64, 3, 1, 1),
        mix1=concat(max_pool(3, 2), unit(96, 3, 2)),
        mix2=concat(
            chain(unit(64), unit(96, 3)),
            chain(unit(64), column(64, 7), row(64, 7), unit(96, 3)),
        ),
        mix3=concat(unit(192, 3, 2), max_pool(3, 2)),
    )


def _a() -> Layer:
    return concat(
        chain(avg_pool(3, 1, 1), unit(96)),
        unit(96),
        chain(unit(64), unit(96, 3, 1, 1)),
        chain(unit(64), unit(96, 3, 1, 1), unit(96, 3, 1, 1)),
    )


def _reduce_a() -> Layer:
    return concat(max_pool(3, 2), unit(384, 3, 2), chain(unit(192), unit(224, 3, 1, 1), unit(256, 3, 2)))


def _b() -> Layer:
    return concat(
        chain(avg_pool(3, 1, 1), unit(128)),
        unit(384),
        chain(unit(192), row(224, 7), column(256, 7)),
        chain(unit(192), row(192, 7), column(224, 7), row(224, 7), column(256, 7)),
    )


def _reduce_b() -> Layer:
    return concat(
        max_pool(3, 2),
        chain(unit(192), unit(192, 3, 2)),
        chain(unit(256), row(256, 7), column(320, 7), unit(320, 3, 2)),
    )


def _c() -> Layer:
    return concat(
        chain(avg_pool(3, 1, 1), unit(256)),
        unit(256),
        chain(unit(384), concat(row(256, 3), column(256, 3))),
        chain(unit(384), row(448, 3), column(512, 3), concat(column(256, 3), row(256, 3))),
    )


def inception_v4(*, num_classes: int, image_shape: Shape) -> nn.Module:
    features = chain(
        stem=_stem(),
        a=chain(*[_a() for _ in range(4)]),
        reduce_a=_reduce_a(),
        b=chain(*[_b() for _ in range(7)]),
        reduce_b=_reduce_b(),
        c=chain(*[_c() for _ in range(3)]),
        pool=avg_pool(8, 1, 1),
        drop=dropout(0.2),
    )
    return network(features, classifier(num_classes), image_shape, sizes=_SIZES)
