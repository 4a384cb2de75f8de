"""What `echelon bench train` trains: two networks, a batch for each worker, and the loop around them.

`resnet20` is bound by its arithmetic: 0.27 million weights, and a batch of 128 images. `mlp25m` is bound by what is
done with its weights: 25 million of them, and a batch of 32. Everything is the same for each contender that runs on
torch: the start (by seed), the batches (a worker sees one, over and over, in memory) and the loop. `peer_mxnet_train`
has the same networks once more, in MXNet's words. torch is imported when a network is built.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from echelon.bench.harness.protocol import Times

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import SGD

IMAGE_SHAPE = (3, 28, 28)
NUM_CLASSES = 10
MLP_WIDTHS = (3 * 32 * 32, 4096, 3072, NUM_CLASSES)
MOMENTUM = 0.9
WEIGHT_DECAY = 1e-4


@dataclass(frozen=True, slots=True)
class Workload:
    """A network with the batch and the learning rate it is trained with here."""

    input_shape: tuple[int, ...]
    batch_size: int
    lr: float
    build: Callable[[], nn.Module]


def _resnet20() -> nn.Module:
    from echelon import models

    return models.build("resnet", num_layers=20, image_shape=IMAGE_SHAPE, num_classes=NUM_CLASSES)


def _mlp25m() -> nn.Module:
    """25.2 million weights: CIFAR's 3072 numbers, two hidden layers, ten classes."""
    from torch import nn

    from echelon.models.initializers import initialize

    inputs, first, second, classes = MLP_WIDTHS
    hidden = [nn.Linear(inputs, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU()]
    model = nn.Sequential(*hidden, nn.Linear(second, classes))
    initialize(model)
    return model


WORKLOADS = {
    "resnet20": Workload(IMAGE_SHAPE, 128, 0.05, _resnet20),
    "mlp25m": Workload(MLP_WIDTHS[:1], 32, 0.001, _mlp25m),
}


def make_model(name: str) -> nn.Module:
    """The network, the same start for everybody."""
    import torch

    torch.manual_seed(0)
    return WORKLOADS[name].build()


def make_optimizer(name: str, model: nn.Module, *, fused: bool = False) -> SGD:
    """SGD over what is trained."""
    import torch

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    lr = WORKLOADS[name].lr
    return torch.optim.SGD(trained, lr=lr, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, fused=fused or None)


def make_batch(name: str, batch_size: int, rank: int) -> tuple[Tensor, Tensor]:
    """A worker's images, uniform in -1 … 1, and labels.

    Channels come last in memory, as oneDNN likes it: three quarters of the CPU time of the other order on a ResNet-20.
    """
    import torch

    generator = torch.Generator().manual_seed(1 + rank)
    images = torch.rand((batch_size, *WORKLOADS[name].input_shape), generator=generator).mul_(2).sub_(1)
    if images.ndim == 4:
        images = images.contiguous(memory_format=torch.channels_last)
    return images, torch.randint(NUM_CLASSES, (batch_size,), generator=generator)


@dataclass(frozen=True, slots=True)
class Loop:
    """A worker's plain loop: `update` ends a step, `begin` and `finish` a round."""

    model: nn.Module
    batch: tuple[Tensor, Tensor]
    begin: Callable[[], None]
    update: Callable[[], None]
    finish: Callable[[], None]

    def run_round(self, num_steps: int) -> Times:
        """The seconds and losses of each step; the last one has to wait for its weights."""
        self.begin()
        losses = []
        marks = [time.perf_counter()]
        for index in range(num_steps):
            losses.append(self._step())
            if index == num_steps - 1:
                self.finish()
            marks.append(time.perf_counter())
        return Times(tuple(after - before for before, after in pairwise(marks)), tuple(losses))

    def _step(self) -> float:
        from torch.nn.functional import cross_entropy

        images, labels = self.batch
        loss = cross_entropy(self.model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self.update()
        return loss.item()
