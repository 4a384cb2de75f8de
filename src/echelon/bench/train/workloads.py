"""The workloads of `echelon bench train`, and the loop that times their steps.

Computation limits `resnet20`: 0.27 million weights and a batch of 128 images. Memory traffic and the exchange of
gradients limit `mlp25m`: 25 million weights and a batch of 32. `gpt` is a small language model: 0.8 million weights in
many small tensors, and a batch of 12 texts of 64 characters. Every contender has the same networks, batch sizes and
optimizer settings: `networks` builds them in torch, `worker_mxnet` in MXNet, which has no `gpt`. This module imports
neither of the two.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from echelon.bench.harness.protocol import Times

IMAGE_SHAPE = (3, 28, 28)
NUM_CLASSES = 10
MLP_WIDTHS = (3 * 32 * 32, 4096, 3072, NUM_CLASSES)
MOMENTUM = 0.9
WEIGHT_DECAY = 1e-4


@dataclass(frozen=True, slots=True)
class Gpt:
    """The sizes of the language model."""

    vocabulary: int = 65
    context: int = 64
    width: int = 128
    heads: int = 4
    layers: int = 4


GPT = Gpt()


@dataclass(frozen=True, slots=True)
class Workload:
    """The input of a network, and the batch size and learning rate it is trained with."""

    input_shape: tuple[int, ...]
    batch_size: int
    lr: float


WORKLOADS = {
    "resnet20": Workload(IMAGE_SHAPE, 128, 0.05),
    "mlp25m": Workload(MLP_WIDTHS[:1], 32, 0.001),
    "gpt": Workload((GPT.context,), 12, 0.01),
}


@dataclass(frozen=True, slots=True)
class Loop:
    """A worker's training loop. `step` returns the loss; `begin` and `finish` are called once per round."""

    step: Callable[[], float]
    begin: Callable[[], None]
    finish: Callable[[], None]

    def run_round(self, num_steps: int) -> Times:
        """Return the seconds and the loss of each step. The time of the last step includes `finish`."""
        self.begin()
        losses = []
        marks = [time.perf_counter()]
        for index in range(num_steps):
            losses.append(self.step())
            if index == num_steps - 1:
                self.finish()
            marks.append(time.perf_counter())
        return Times(tuple(after - before for before, after in pairwise(marks)), tuple(losses))
