"""ResNet v1: batch norm after each convolution, relu after the sum; a bottleneck has its stride in the first one."""

from __future__ import annotations

from functools import partial

from torch import nn

from echelon.models.layers import (
    Layer,
    Shape,
    chain,
    classifier,
    conv_bn,
    global_avg_pool,
    max_pool,
    network,
    relu,
    residual,
)
from echelon.models.residual import Plan, plan, stages

linear = partial(conv_bn, eps=2e-5, fix_gamma=False)
unit = partial(linear, activation=relu)


def add_relu(body: Layer, filters: int, stride: int, projects: bool) -> Layer:
    """Return the residual unit around `body`. The shortcut is the identity, or a 1x1 convolution with batch norm."""
    return chain(sum=residual(body, linear(filters, 1, stride) if projects else None), relu=relu())


def basic(filters: int, stride: int, projects: bool) -> Layer:
    body = chain(conv1=unit(filters, 3, stride, 1), conv2=linear(filters, 3, 1, 1))
    return add_relu(body, filters, stride, projects)


def _bottleneck(filters: int, stride: int, projects: bool) -> Layer:
    body = chain(
        conv1=unit(filters // 4, 1, stride),
        conv2=unit(filters // 4, 3, 1, 1),
        conv3=linear(filters),
    )
    return add_relu(body, filters, stride, projects)


def _stem(chosen: Plan) -> Layer:
    if chosen.small_stem:  # MXNet has no relu here.
        return chain(conv0=linear(chosen.stem_filters, 3, 1, 1))
    return chain(conv0=unit(chosen.stem_filters, 7, 2, 3), pool0=max_pool(3, 2, 1))


def resnet_v1(*, num_classes: int, image_shape: Shape, num_layers: int | None = None) -> nn.Module:
    chosen = plan("resnet-v1", num_layers, image_shape)
    features = chain(
        stem=_stem(chosen),
        stages=stages(chosen, _bottleneck if chosen.bottleneck else basic),
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
