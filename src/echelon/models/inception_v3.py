"""Inception v3, for 299x299 images. The final pooling window is 8x8, so 224x224 images are too small."""

from __future__ import annotations

from functools import partial

from torch import nn

from echelon.models.layers import Layer, Shape, avg_pool, chain, classifier, concat, conv_bn, max_pool, network, relu

_SIZES = "inception-v3 is designed for 299x299 images and needs at least 299x299."

unit = partial(conv_bn, activation=relu)


def row(filters: int, length: int) -> Layer:
    """A 1 x length convolution that keeps the size."""
    return unit(filters, (1, length), 1, (0, length // 2))


def column(filters: int, length: int) -> Layer:
    """A length x 1 convolution that keeps the size."""
    return unit(filters, (length, 1), 1, (length // 2, 0))


def _a(proj: int) -> Layer:
    return concat(
        unit(64),
        chain(unit(48), unit(64, 5, 1, 2)),
        chain(unit(64), unit(96, 3, 1, 1), unit(96, 3, 1, 1)),
        chain(avg_pool(3, 1, 1), unit(proj)),
    )


def _b() -> Layer:
    return concat(unit(384, 3, 2), chain(unit(64), unit(96, 3, 1, 1), unit(96, 3, 2)), max_pool(3, 2))


def _c(mid: int) -> Layer:
    return concat(
        unit(192),
        chain(unit(mid), row(mid, 7), column(192, 7)),
        chain(unit(mid), column(mid, 7), row(mid, 7), column(mid, 7), row(192, 7)),
        chain(avg_pool(3, 1, 1), unit(192)),
    )


def _d() -> Layer:
    return concat(
        chain(unit(192), unit(320, 3, 2)),
        chain(unit(192), row(192, 7), column(192, 7), unit(192, 3, 2)),
        max_pool(3, 2),
    )


def _e(pool: Layer) -> Layer:
    return concat(
        unit(320),
        chain(unit(384), concat(row(384, 3), column(384, 3))),
        chain(unit(448), unit(384, 3, 1, 1), concat(row(384, 3), column(384, 3))),
        chain(pool, unit(192)),
    )


def inception_v3(*, num_classes: int, image_shape: Shape) -> nn.Module:
    features = chain(
        conv1=unit(32, 3, 2),
        conv2=unit(32, 3),
        conv3=unit(64, 3, 1, 1),
        pool3=max_pool(3, 2),
        conv4=unit(80),
        conv5=unit(192, 3),
        pool5=max_pool(3, 2),
        a1=_a(32),
        a2=_a(64),
        a3=_a(64),
        b=_b(),
        c1=_c(128),
        c2=_c(160),
        c3=_c(160),
        c4=_c(192),
        d=_d(),
        e1=_e(avg_pool(3, 1, 1)),
        e2=_e(max_pool(3, 1, 1)),
        pool=avg_pool(8),
    )
    return network(features, classifier(num_classes), image_shape, sizes=_SIZES)
