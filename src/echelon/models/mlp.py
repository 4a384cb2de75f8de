"""A multilayer perceptron with hidden layers of 128 and 64 units."""

from __future__ import annotations

from torch import nn

from echelon.models.layers import Shape, classifier, flatten, network


def mlp(*, num_classes: int, image_shape: Shape) -> nn.Module:
    return network(flatten(), classifier(num_classes, (128, 64)), image_shape)
