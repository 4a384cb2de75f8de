"""VGG without batch norm: 11, 13, 16 or 19 layers."""

from __future__ import annotations

from torch import nn

from echelon.errors import UsageError
from echelon.models.layers import Layer, Shape, chain, classifier, conv_relu, max_pool, network

CONVOLUTIONS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
_FILTERS = (64, 128, 256, 512, 512)


def vgg(*, num_classes: int, image_shape: Shape, num_layers: int = 11) -> nn.Module:
    if num_layers not in CONVOLUTIONS:
        depths = ", ".join(map(str, CONVOLUTIONS))
        raise UsageError(
            f"vgg does not exist with {num_layers} layers; choose from {depths}. "
            "The default depth of the training scripts is for resnet: give --num-layers with vgg."
        )
    groups: dict[str, Layer] = {}
    for index, (count, filters) in enumerate(zip(CONVOLUTIONS[num_layers], _FILTERS, strict=True), start=1):
        convolutions = {f"conv{unit}": conv_relu(filters, 3, 1, 1) for unit in range(1, count + 1)}
        groups[f"group{index}"] = chain(**convolutions, pool=max_pool(2, 2))
    sizes = "vgg is designed for 224x224 images and needs at least 32x32."
    return network(chain(**groups), classifier(num_classes, (4096, 4096), drop=0.5), image_shape, sizes=sizes)
