"""The networks without batch norm: mlp, lenet, digits-cnn, alexnet, vgg and googlenet."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.errors import UsageError
from echelon.models.layers import (
    Layer,
    Shape,
    chain,
    classifier,
    concat,
    conv,
    conv_relu,
    each,
    flatten,
    global_avg_pool,
    max_pool,
    network,
)

_VGG_CONVOLUTIONS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
_VGG_FILTERS = (64, 128, 256, 512, 512)


def mlp(*, num_classes: int, image_shape: Shape) -> nn.Module:
    """Build a multilayer perceptron with hidden layers of 128 and 64 units."""
    return network(flatten(), classifier(num_classes, (128, 64)), image_shape)


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


def _conv_tanh_pool(filters: int) -> Layer:
    return chain(conv=conv(filters, 5), tanh=each(nn.Tanh), pool=max_pool(2, 2))


def lenet(*, num_classes: int, image_shape: Shape, add_stn: bool = False) -> nn.Module:
    """Build LeNet, with an optional spatial transformer in front of it."""
    steps = {"conv1": _conv_tanh_pool(20), "conv2": _conv_tanh_pool(50)}
    if add_stn:
        steps = {"stn": lambda shape: (SpatialTransformer(shape), shape)} | steps
    sizes = "lenet is designed for 28x28 images and needs at least 16x16."
    return network(chain(**steps), classifier(num_classes, (500,), activation=nn.Tanh), image_shape, sizes=sizes)


def _conv_tanh(filters: int) -> Layer:
    return chain(conv=conv(filters, 3, 1, 1), tanh=each(nn.Tanh))


def digits_cnn(*, num_classes: int, image_shape: Shape) -> nn.Module:
    """Build a small network for the 1x8x8 digits that ship with the package. The demo and the tests use it.

    25,866 parameters. Six epochs of SGD with momentum 0.9 take about a second and reach 0.97 to 0.99 validation
    accuracy at every learning rate from 0.02 to 0.1 with batches of 32 or 64. With relu instead of tanh, most runs
    diverged at 0.1, and a demonstration of stale gradients needs that margin. There is no batch norm because its
    running statistics differ between workers, and the result should not depend on whose statistics are used.
    """
    features = chain(
        conv1=_conv_tanh(16),
        conv2=_conv_tanh(32),
        pool2=max_pool(2, 2),
        conv3=_conv_tanh(64),
        pool3=max_pool(2, 2),
    )
    sizes = "digits-cnn is designed for 8x8 images and needs at least 4x4."
    return network(features, classifier(num_classes), image_shape, sizes=sizes)


class WideResponseNorm(nn.LocalResponseNorm):
    """Computes in float32: it squares activations, and in float16 squares above 65,504 overflow."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised input in the dtype of the input."""
        wide = torch.promote_types(input.dtype, torch.float32)
        return super().forward(input.to(wide)).to(input.dtype)


def alexnet(*, num_classes: int, image_shape: Shape) -> nn.Module:
    """Build AlexNet as one tower, with response normalisation after each of the first two convolutions."""
    norm = each(lambda: WideResponseNorm(5, alpha=1e-4, beta=0.75, k=2.0))
    features = chain(
        conv1=conv_relu(96, 11, 4),
        norm1=norm,
        pool1=max_pool(3, 2),
        conv2=conv_relu(256, 5, 1, 2),
        norm2=norm,
        pool2=max_pool(3, 2),
        conv3=conv_relu(384, 3, 1, 1),
        conv4=conv_relu(384, 3, 1, 1),
        conv5=conv_relu(256, 3, 1, 1),
        pool5=max_pool(3, 2),
    )
    sizes = "alexnet is designed for 224x224 images and needs at least 67x67."
    return network(features, classifier(num_classes, (4096, 4096), drop=0.5), image_shape, sizes=sizes)


def vgg(*, num_classes: int, image_shape: Shape, num_layers: int = 11) -> nn.Module:
    """Build VGG without batch norm: 11, 13, 16 or 19 layers."""
    if num_layers not in _VGG_CONVOLUTIONS:
        depths = ", ".join(map(str, _VGG_CONVOLUTIONS))
        raise UsageError(
            f"vgg does not exist with {num_layers} layers; choose from {depths}. "
            "The default depth of the training scripts is for resnet: give --num-layers with vgg."
        )
    groups: dict[str, Layer] = {}
    for index, (count, filters) in enumerate(zip(_VGG_CONVOLUTIONS[num_layers], _VGG_FILTERS, strict=True), start=1):
        convolutions = {f"conv{unit}": conv_relu(filters, 3, 1, 1) for unit in range(1, count + 1)}
        groups[f"group{index}"] = chain(**convolutions, pool=max_pool(2, 2))
    sizes = "vgg is designed for 224x224 images and needs at least 32x32."
    return network(chain(**groups), classifier(num_classes, (4096, 4096), drop=0.5), image_shape, sizes=sizes)


def _inception(one: int, red3: int, three: int, red5: int, five: int, proj: int) -> Layer:
    return concat(
        conv_relu(one),
        chain(conv_relu(red3), conv_relu(three, 3, 1, 1)),
        chain(conv_relu(red5), conv_relu(five, 5, 1, 2)),
        chain(max_pool(3, 1, 1), conv_relu(proj)),
    )


def googlenet(*, num_classes: int, image_shape: Shape) -> nn.Module:
    """Build GoogLeNet (the first Inception) without auxiliary classifiers, batch norm or dropout."""
    features = chain(
        conv1=conv_relu(64, 7, 2, 3),
        pool1=max_pool(3, 2),
        conv2=conv_relu(64),
        conv3=conv_relu(192, 3, 1, 1),
        pool3=max_pool(3, 2),
        in3a=_inception(64, 96, 128, 16, 32, 32),
        in3b=_inception(128, 128, 192, 32, 96, 64),
        pool4=max_pool(3, 2),
        in4a=_inception(192, 96, 208, 16, 48, 64),
        in4b=_inception(160, 112, 224, 24, 64, 64),
        in4c=_inception(128, 128, 256, 24, 64, 64),
        in4d=_inception(112, 144, 288, 32, 64, 64),
        in4e=_inception(256, 160, 320, 32, 128, 128),
        pool5=max_pool(3, 2),
        in5a=_inception(256, 160, 320, 32, 128, 128),
        in5b=_inception(384, 192, 384, 48, 128, 128),
        pool6=global_avg_pool(),
    )
    sizes = "googlenet is designed for 224x224 images and needs at least 61x61."
    return network(features, classifier(num_classes), image_shape, sizes=sizes)
