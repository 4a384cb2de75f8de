"""ResNeXt: ResNet v1 with grouped convolutions in bottlenecks that are half as wide as their output."""

from __future__ import annotations

from functools import partial

from torch import nn

from echelon.errors import UsageError
from echelon.models.layers import Layer, Shape, batch_norm, chain, classifier, conv, global_avg_pool, max_pool, network
from echelon.models.residual import Plan, plan, stages
from echelon.models.resnet_v1 import add_relu, basic, linear, unit

_SMALL_HEIGHT = 32  # Unlike resnet (28): a 32x32 image gets the CIFAR stages.


def _bottleneck(filters: int, stride: int, projects: bool, *, num_group: int) -> Layer:
    body = chain(
        conv1=unit(filters // 2),
        conv2=unit(filters // 2, 3, stride, 1, groups=num_group),
        conv3=linear(filters),
    )
    return add_relu(body, filters, stride, projects)


def _stem(chosen: Plan) -> Layer:
    if chosen.small_stem:
        return chain(conv0=conv(chosen.stem_filters, 3, 1, 1, bias=False))
    return chain(conv0=unit(chosen.stem_filters, 7, 2, 3), pool0=max_pool(3, 2, 1))


def resnext(*, num_classes: int, image_shape: Shape, num_layers: int | None = None, num_group: int = 32) -> nn.Module:
    chosen = plan("resnext", num_layers, image_shape, small_height=_SMALL_HEIGHT)
    narrowest = chosen.filters[0] // 2
    if chosen.bottleneck and (num_group < 1 or narrowest % num_group):
        raise UsageError(f"resnext cannot divide {narrowest} channels into num_group={num_group} equal groups.")
    features = chain(
        bn_data=batch_norm(2e-5, fix_gamma=True),
        stem=_stem(chosen),
        stages=stages(chosen, partial(_bottleneck, num_group=num_group) if chosen.bottleneck else basic),
        pool1=global_avg_pool(),
    )
    return network(features, classifier(num_classes), image_shape)
