"""ResNet v2: batch norm and relu come before each convolution, and nothing follows the sum."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from echelon.models.layers import (
    Built,
    Layer,
    Shape,
    batch_norm,
    chain,
    classifier,
    conv,
    global_avg_pool,
    max_pool,
    network,
    relu,
)
from echelon.models.residual import Plan, plan, stages

EPS = 2e-5

_conv = partial(conv, bias=False)


def _bn_relu() -> Layer:
    return chain(bn=batch_norm(EPS, fix_gamma=False), relu=relu())


class PreActivationUnit(nn.Module):
    """Returns body(a) + x with a = relu(bn(x)); a unit with a projection adds shortcut(a) instead of x."""

    def __init__(self, activate: nn.Module, body: nn.Module, shortcut: nn.Module | None) -> None:
        super().__init__()
        self.activate, self.body, self.shortcut = activate, body, shortcut

    def forward(self, x: Tensor) -> Tensor:
        a = self.activate(x)
        y: Tensor = self.body(a)
        return y + (x if self.shortcut is None else self.shortcut(a))


def _unit(filters: int, stride: int, projects: bool, *, bottleneck: bool) -> Layer:
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


def _stem(chosen: Plan) -> Layer:
    if chosen.small_stem:
        return chain(conv0=_conv(chosen.stem_filters, 3, 1, 1))
    return chain(conv0=_conv(chosen.stem_filters, 7, 2, 3), norm0=_bn_relu(), pool0=max_pool(3, 2, 1))


def resnet(*, num_classes: int, image_shape: Shape, num_layers: int | None = None) -> nn.Module:
    chosen = plan("resnet", num_layers, image_shape)
    features = chain(
        bn_data=batch_norm(EPS, fix_gamma=True),
        stem=_stem(chosen),
        stages=stages(chosen, partial(_unit, bottleneck=chosen.bottleneck)),
        norm1=_bn_relu(),
        pool1=global_avg_pool(),
    )
    return network(features, classifier(num_classes), image_shape)
