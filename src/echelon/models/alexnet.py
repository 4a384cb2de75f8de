"""AlexNet as one tower, with local response normalisation after each of the first two convolutions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from echelon.models.layers import Layer, Shape, chain, classifier, conv_relu, each, max_pool, network

_SIZES = "alexnet is designed for 224x224 images and needs at least 67x67."


class WideResponseNorm(nn.LocalResponseNorm):
    """Computes in float32: it squares activations, and in float16 squares above 65,504 overflow."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised input in the dtype of the input."""
        wide = torch.promote_types(input.dtype, torch.float32)
        return super().forward(input.to(wide)).to(input.dtype)


def _norm() -> Layer:
    return each(lambda: WideResponseNorm(5, alpha=1e-4, beta=0.75, k=2.0))


def alexnet(*, num_classes: int, image_shape: Shape) -> nn.Module:
    features = chain(
        conv1=conv_relu(96, 11, 4),
        norm1=_norm(),
        pool1=max_pool(3, 2),
        conv2=conv_relu(256, 5, 1, 2),
        norm2=_norm(),
        pool2=max_pool(3, 2),
        conv3=conv_relu(384, 3, 1, 1),
        conv4=conv_relu(384, 3, 1, 1),
        conv5=conv_relu(256, 3, 1, 1),
        pool5=max_pool(3, 2),
    )
    return network(features, classifier(num_classes, (4096, 4096), drop=0.5), image_shape, sizes=_SIZES)
