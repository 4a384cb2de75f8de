"""LeNet, with an optional spatial transformer in front of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.models.layers import (
    Layer,
    Shape,
    chain,
    classifier,
    conv,
    conv_relu,
    each,
    flatten,
    global_avg_pool,
    max_pool,
    network,
)

_SIZES = "lenet is designed for 28x28 images and needs at least 16x16."


class AffineHead(nn.Linear):
    """Returns the six numbers of an affine map. It is initialised to the identity.

    MXNet draws these weights at random, so that its first transforms shrink the image to about one pixel.
    """

    keeps_initialization = True

    def __init__(self, in_features: int) -> None:
        super().__init__(in_features, 6)

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.zero_()
            self.bias.copy_(torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 0.0]))


class SpatialTransformer(nn.Module):
    """Resamples the image with an affine map that a small network computes from the image."""

    def __init__(self, image_shape: Shape) -> None:
        super().__init__()
        locate = chain(
            conv1=conv_relu(30, 5, 2),
            pool1=max_pool(2, 2),
            conv2=conv_relu(60, 3, 1, 1),
            pool2=global_avg_pool(),
            flatten=flatten(),
        )
        self.locate, (features, _, _) = locate(image_shape)
        self.affine = AffineHead(features)

    def forward(self, x: Tensor) -> Tensor:
        theta = self.affine(self.locate(x)).view(-1, 2, 3)
        grid = F.affine_grid(theta, list(x.shape), align_corners=True)
        return F.grid_sample(x, grid, align_corners=True)


def _conv_tanh(filters: int) -> Layer:
    return chain(conv=conv(filters, 5), tanh=each(nn.Tanh), pool=max_pool(2, 2))


def lenet(*, num_classes: int, image_shape: Shape, add_stn: bool = False) -> nn.Module:
    steps = {"conv1": _conv_tanh(20), "conv2": _conv_tanh(50)}
    if add_stn:
        steps = {"stn": lambda shape: (SpatialTransformer(shape), shape)} | steps
    return network(chain(**steps), classifier(num_classes, (500,), activation=nn.Tanh), image_shape, sizes=_SIZES)
