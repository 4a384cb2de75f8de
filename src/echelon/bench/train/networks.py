"""The workloads in torch: network, optimizer, batch and training step.

Every contender that uses torch starts from the same weights (by seed). Each worker trains on one batch of its own,
which stays in memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from echelon import models
from echelon.bench.train.workloads import IMAGE_SHAPE, MLP_WIDTHS, MOMENTUM, NUM_CLASSES, WEIGHT_DECAY, WORKLOADS
from echelon.models.initializers import initialize


def make_model(name: str) -> nn.Module:
    """Build a network. The initial weights are the same in every process."""
    torch.manual_seed(0)
    return {"resnet20": _resnet20, "mlp25m": _mlp25m}[name]()


def _resnet20() -> nn.Module:
    return models.build("resnet", num_layers=20, image_shape=IMAGE_SHAPE, num_classes=NUM_CLASSES)


def _mlp25m() -> nn.Module:
    """Build a network of 25.2 million weights: 3072 inputs as in CIFAR, two hidden layers, ten classes."""
    inputs, first, second, classes = MLP_WIDTHS
    hidden = [nn.Linear(inputs, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU()]
    model = nn.Sequential(*hidden, nn.Linear(second, classes))
    initialize(model)
    return model


def make_optimizer(name: str, model: nn.Module, *, fused: bool = False) -> SGD:
    """Return SGD over the trainable parameters."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    lr = WORKLOADS[name].lr
    return SGD(trained, lr=lr, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, fused=fused or None)


def make_batch(name: str, batch_size: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return a worker's images, uniform in -1 … 1, and labels.

    Images are in channels-last memory format. It is faster in oneDNN: a ResNet-20 takes three quarters of the CPU time.
    """
    generator = torch.Generator().manual_seed(1 + rank)
    images = torch.rand((batch_size, *WORKLOADS[name].input_shape), generator=generator).mul_(2).sub_(1)
    if images.ndim == 4:
        images = images.contiguous(memory_format=torch.channels_last)
    return images, torch.randint(NUM_CLASSES, (batch_size,), generator=generator)


def make_step(model: nn.Module, batch: tuple[Tensor, Tensor], update: Callable[[], object]) -> Callable[[], float]:
    """Return a function that does one training step and returns its loss. `update` ends the step."""
    images, labels = batch

    def step() -> float:
        loss = cross_entropy(model(images), labels)
        loss.backward()
        update()
        return loss.item()

    return step
