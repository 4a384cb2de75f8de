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
from echelon.bench.train.workloads import GPT, IMAGE_SHAPE, MLP_WIDTHS, MOMENTUM, NUM_CLASSES, WEIGHT_DECAY, WORKLOADS
from echelon.models.initializers import initialize


def make_model(name: str) -> nn.Module:
    """Build a network. The initial weights are the same in every process."""
    torch.manual_seed(0)
    return {"resnet20": _resnet20, "mlp25m": _mlp25m, "gpt": LanguageModel}[name]()


def _resnet20() -> nn.Module:
    return models.build("resnet", num_layers=20, image_shape=IMAGE_SHAPE, num_classes=NUM_CLASSES)


def _mlp25m() -> nn.Module:
    """Build a network of 25.2 million weights: 3072 inputs as in CIFAR, two hidden layers, ten classes."""
    inputs, first, second, classes = MLP_WIDTHS
    hidden = [nn.Linear(inputs, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU()]
    model = nn.Sequential(*hidden, nn.Linear(second, classes))
    initialize(model)
    return model


class LanguageModel(nn.Module):
    """Predicts the next character of a text: a transformer that looks back only."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(GPT.vocabulary, GPT.width)
        self.positions = nn.Embedding(GPT.context, GPT.width)
        layer = nn.TransformerEncoderLayer(
            GPT.width, GPT.heads, 4 * GPT.width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, GPT.layers, nn.LayerNorm(GPT.width), enable_nested_tensor=False)
        self.head = nn.Linear(GPT.width, GPT.vocabulary, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(GPT.context), persistent=False)

    def forward(self, texts: Tensor) -> Tensor:
        """Return a row of logits for each character of each text."""
        hidden = self.characters(texts) + self.positions.weight
        logits: Tensor = self.head(self.layers(hidden, mask=self.mask, is_causal=True))
        return logits.flatten(0, 1)


def make_optimizer(name: str, model: nn.Module, *, fused: bool = False) -> SGD:
    """Return SGD over the trainable parameters."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    lr = WORKLOADS[name].lr
    return SGD(trained, lr=lr, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, fused=fused or None)


def make_batch(name: str, batch_size: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return a worker's images, uniform in -1 … 1, and labels; or texts, and the character after each character.

    Images are in channels-last memory format. It is faster in oneDNN: a ResNet-20 takes three quarters of the CPU time.
    """
    generator = torch.Generator().manual_seed(1 + rank)
    if name == "gpt":
        texts = torch.randint(GPT.vocabulary, (batch_size, GPT.context + 1), generator=generator)
        return texts[:, :-1], texts[:, 1:].flatten()
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
