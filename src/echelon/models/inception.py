"""Inception v3, v4 and Inception-ResNet v2, for 299x299 images. Their predecessor is in `inception_bn`."""

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

_conv = partial(conv_bn, activation=relu)
_biased_linear = partial(conv_bn, bias=True)
_biased_conv = partial(_biased_linear, activation=relu)


def _row(filters: int, length: int) -> Layer:
    """A 1 x length convolution that keeps the size."""
    return _conv(filters, (1, length), 1, (0, length // 2))


def _column(filters: int, length: int) -> Layer:
    """A length x 1 convolution that keeps the size."""
    return _conv(filters, (length, 1), 1, (length // 2, 0))


def _v3_a(proj: int) -> Layer:
    return concat(
        _conv(64),
        chain(_conv(48), _conv(64, 5, 1, 2)),
        chain(_conv(64), _conv(96, 3, 1, 1), _conv(96, 3, 1, 1)),
        chain(avg_pool(3, 1, 1), _conv(proj)),
    )


def _v3_b() -> Layer:
    return concat(_conv(384, 3, 2), chain(_conv(64), _conv(96, 3, 1, 1), _conv(96, 3, 2)), max_pool(3, 2))


def _v3_c(mid: int) -> Layer:
    return concat(
        _conv(192),
        chain(_conv(mid), _row(mid, 7), _column(192, 7)),
        chain(_conv(mid), _column(mid, 7), _row(mid, 7), _column(mid, 7), _row(192, 7)),
        chain(avg_pool(3, 1, 1), _conv(192)),
    )


def _v3_d() -> Layer:
    return concat(
        chain(_conv(192), _conv(320, 3, 2)),
        chain(_conv(192), _row(192, 7), _column(192, 7), _conv(192, 3, 2)),
        max_pool(3, 2),
    )


def _v3_e(pool: Layer) -> Layer:
    return concat(
        _conv(320),
        chain(_conv(384), concat(_row(384, 3), _column(384, 3))),
        chain(_conv(448), _conv(384, 3, 1, 1), concat(_row(384, 3), _column(384, 3))),
        chain(pool, _conv(192)),
    )


def inception_v3(*, num_classes: int, image_shape: Shape) -> nn.Module:
    """Build Inception v3. Its final pooling window is 8x8, so 224x224 images are too small."""
    features = chain(
        conv1=_conv(32, 3, 2),
        conv2=_conv(32, 3),
        conv3=_conv(64, 3, 1, 1),
        pool3=max_pool(3, 2),
        conv4=_conv(80),
        conv5=_conv(192, 3),
        pool5=max_pool(3, 2),
        a1=_v3_a(32),
        a2=_v3_a(64),
        a3=_v3_a(64),
        b=_v3_b(),
        c1=_v3_c(128),
        c2=_v3_c(160),
        c3=_v3_c(160),
        c4=_v3_c(192),
        d=_v3_d(),
        e1=_v3_e(avg_pool(3, 1, 1)),
        e2=_v3_e(max_pool(3, 1, 1)),
        pool=avg_pool(8),
    )
    sizes = "inception-v3 is designed for 299x299 images and needs at least 299x299."
    return network(features, classifier(num_classes), image_shape, sizes=sizes)


def _v4_stem() -> Layer:
    return chain(
        conv1=_conv(32, 3, 2),
        conv2=_conv(32, 3),
        conv3=_conv(64, 3, 1, 1),
        mix1=concat(max_pool(3, 2), _conv(96, 3, 2)),
        mix2=concat(
            chain(_conv(64), _conv(96, 3)),
            chain(_conv(64), _column(64, 7), _row(64, 7), _conv(96, 3)),
        ),
        mix3=concat(_conv(192, 3, 2), max_pool(3, 2)),
    )


def _v4_a() -> Layer:
    return concat(
        chain(avg_pool(3, 1, 1), _conv(96)),
        _conv(96),
        chain(_conv(64), _conv(96, 3, 1, 1)),
        chain(_conv(64), _conv(96, 3, 1, 1), _conv(96, 3, 1, 1)),
    )


def _v4_reduce_a() -> Layer:
    return concat(max_pool(3, 2), _conv(384, 3, 2), chain(_conv(192), _conv(224, 3, 1, 1), _conv(256, 3, 2)))


def _v4_b() -> Layer:
    return concat(
        chain(avg_pool(3, 1, 1), _conv(128)),
        _conv(384),
        chain(_conv(192), _row(224, 7), _column(256, 7)),
        chain(_conv(192), _row(192, 7), _column(224, 7), _row(224, 7), _column(256, 7)),
    )


def _v4_reduce_b() -> Layer:
    return concat(
        max_pool(3, 2),
        chain(_conv(192), _conv(192, 3, 2)),
        chain(_conv(256), _row(256, 7), _column(320, 7), _conv(320, 3, 2)),
    )


def _v4_c() -> Layer:
    return concat(
        chain(avg_pool(3, 1, 1), _conv(256)),
        _conv(256),
        chain(_conv(384), concat(_row(256, 3), _column(256, 3))),
        chain(_conv(384), _row(448, 3), _column(512, 3), concat(_column(256, 3), _row(256, 3))),
    )


def inception_v4(*, num_classes: int, image_shape: Shape) -> nn.Module:
    """Build Inception v4.

    MXNet's final 8x8 average pooling has stride 1 and padding 1, so an 8x8 map becomes 3x3 and the classifier gets
    13,824 features. That makes 55 million parameters; global average pooling would make 43 million. It is kept because
    MXNet's checkpoints have that shape.
    """
    features = chain(
        stem=_v4_stem(),
        a=chain(*[_v4_a() for _ in range(4)]),
        reduce_a=_v4_reduce_a(),
        b=chain(*[_v4_b() for _ in range(7)]),
        reduce_b=_v4_reduce_b(),
        c=chain(*[_v4_c() for _ in range(3)]),
        pool=avg_pool(8, 1, 1),
        drop=dropout(0.2),
    )
    sizes = "inception-v4 is designed for 299x299 images and needs at least 235x235."
    return network(features, classifier(num_classes), image_shape, sizes=sizes)


def _mixed() -> Layer:
    return concat(
        _biased_conv(96),
        chain(_biased_conv(48), _biased_conv(64, 5, 1, 2)),
        chain(_biased_conv(64), _biased_conv(96, 3, 1, 1), _biased_conv(96, 3, 1, 1)),
        chain(avg_pool(3, 1, 1), _biased_conv(64)),
    )


def _block35() -> Layer:
    branches = concat(
        _biased_conv(32),
        chain(_biased_conv(32), _biased_conv(32, 3, 1, 1)),
        chain(_biased_conv(32), _biased_conv(48, 3, 1, 1), _biased_conv(64, 3, 1, 1)),
    )
    return chain(sum=residual(chain(mix=branches, out=_biased_linear(320)), scale=0.17), relu=relu())


def _block17() -> Layer:
    # The 129 filters and the uneven padding come from MXNet and are needed to load its checkpoints.
    branches = concat(
        _biased_conv(192),
        chain(_biased_conv(129), _biased_conv(160, (1, 7), 1, (1, 2)), _biased_conv(192, (7, 1), 1, (2, 1))),
    )
    return chain(sum=residual(chain(mix=branches, out=_biased_linear(1088)), scale=0.1), relu=relu())


def _block8(scale: float = 0.2) -> Layer:
    branches = concat(
        _biased_conv(192),
        chain(_biased_conv(192), _biased_conv(224, (1, 3), 1, (0, 1)), _biased_conv(256, (3, 1), 1, (1, 0))),
    )
    return residual(chain(mix=branches, out=_biased_linear(2080)), scale=scale)


def _resnet_reduce_a() -> Layer:
    return concat(
        _biased_conv(384, 3, 2),
        chain(_biased_conv(256), _biased_conv(256, 3, 1, 1), _biased_conv(384, 3, 2)),
        max_pool(3, 2),
    )


def _resnet_reduce_b() -> Layer:
    return concat(
        chain(_biased_conv(256), _biased_conv(384, 3, 2)),
        chain(_biased_conv(256), _biased_conv(288, 3, 2)),
        chain(_biased_conv(256), _biased_conv(288, 3, 1, 1), _biased_conv(320, 3, 2)),
        max_pool(3, 2),
    )


def inception_resnet_v2(*, num_classes: int, image_shape: Shape) -> nn.Module:
    """Build Inception-ResNet v2: inception branches that are scaled down and added to their input."""
    features = chain(
        conv1=_biased_conv(32, 3, 2),
        conv2=_biased_conv(32, 3),
        conv3=_biased_conv(64, 3, 1, 1),
        pool3=max_pool(3, 2),
        conv4=_biased_conv(80),
        conv5=_biased_conv(192, 3),
        pool5=max_pool(3, 2),
        mixed=_mixed(),
        block35=chain(*[_block35() for _ in range(10)]),
        reduce_a=_resnet_reduce_a(),
        block17=chain(*[_block17() for _ in range(20)]),
        reduce_b=_resnet_reduce_b(),
        block8=chain(*[chain(sum=_block8(), relu=relu()) for _ in range(9)]),
        block8_last=_block8(scale=1.0),
        conv6=_biased_conv(1536),
        pool6=global_avg_pool(),
        drop=dropout(0.2),
    )
    sizes = "inception-resnet-v2 is designed for 299x299 images and needs at least 75x75."
    return network(features, classifier(num_classes), image_shape, sizes=sizes)
