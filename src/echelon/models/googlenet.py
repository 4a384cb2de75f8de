"""GoogLeNet (the first Inception) without auxiliary classifiers, batch norm or dropout."""

from __future__ import annotations

from torch import nn

from echelon.models.layers import Layer, Shape, chain, classifier, concat, conv_relu, global_avg_pool, max_pool, network

_SIZES = "googlenet is designed for 224x224 images and needs at least 61x61."


def _block(one: int, red3: int, three: int, red5: int, five: int, proj: int) -> Layer:
    return concat(
        conv_relu(one),
        chain(conv_relu(red3), conv_relu(three, 3, 1, 1)),
        chain(conv_relu(red5), conv_relu(five, 5, 1, 2)),
        chain(max_pool(3, 1, 1), conv_relu(proj)),
    )


def googlenet(*, num_classes: int, image_shape: Shape) -> nn.Module:
    features = chain(
        conv1=conv_relu(64, 7, 2, 3),
        pool1=max_pool(3, 2),
        conv2=conv_relu(64),
        conv3=conv_relu(192, 3, 1, 1),
        pool3=max_pool(3, 2),
        in3a=_block(64, 96, 128, 16, 32, 32),
        in3b=_block(128, 128, 192, 32, 96, 64),
        pool4=max_pool(3, 2),
        in4a=_block(192, 96, 208, 16, 48, 64),
        in4b=_block(160, 112, 224, 24, 64, 64),
        in4c=_block(128, 128, 256, 24, 64, 64),
        in4d=_block(112, 144, 288, 32, 64, 64),
        in4e=_block(256, 160, 320, 32, 128, 128),
        pool5=max_pool(3, 2),
        in5a=_block(256, 160, 320, 32, 128, 128),
        in5b=_block(384, 192, 384, 48, 128, 128),
        pool6=global_avg_pool(),
    )
    return network(features, classifier(num_classes), image_shape, sizes=_SIZES)
