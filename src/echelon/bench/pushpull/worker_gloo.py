"""One rank of the Gloo peer: the fastest plain way in which a PyTorch job exchanges its gradients.

A step is an all-reduce of the flat gradients in 25 MB buckets (DDP's default size), all in flight at once, and then one
fused SGD with momentum and weight decay over the flat weights.

The all-reduce replaces the gradients in place, so they are written again before each step, as a backward pass would.
That part is not timed. There is no barrier between steps: a late rank delays the other's all-reduce.

Alternatives, measured once on a machine with other load (48 steps each, in turns): buckets of 8 MB took 1.01 times as
long and a single bucket 0.98 times, which is no difference. An SGD per bucket as it arrives took 0.94 times as long
(0.69 to 1.20 over the rounds), so this may not be the fastest form of Gloo. Measure that again on a quiet machine.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

from echelon.bench.harness.protocol import serve, timed
from echelon.bench.pushpull.shapes import num_elements, shapes

BUCKET_BYTES = 25 * 1024 * 1024


class FlatModel:
    """A model whose weights and gradients are one flat tensor each, with its optimizer."""

    def __init__(self, size: int, seed: int) -> None:
        self._fresh = torch.randn(size, generator=torch.Generator().manual_seed(seed)).mul_(1e-3)
        self._weights = torch.nn.Parameter(torch.ones(size))
        self._gradients = torch.zeros(size)
        self._weights.grad = self._gradients
        length = BUCKET_BYTES // self._gradients.element_size()
        self._buckets = [self._gradients[start : start + length] for start in range(0, size, length)]
        self._optimizer = torch.optim.SGD([self._weights], lr=0.1, momentum=0.9, weight_decay=1e-4, fused=True)

    def backward(self) -> None:
        """Write the gradients, as a backward pass would."""
        self._gradients.copy_(self._fresh)

    def step(self) -> None:
        """Sum the gradients over the ranks and update the weights."""
        for work in [dist.all_reduce(bucket, async_op=True) for bucket in self._buckets]:
            work.wait()
        self._optimizer.step()

    def timed_step(self) -> float:
        """Write new gradients, do a step and return the seconds of the step."""
        self.backward()
        return timed(self.step)


def main() -> None:
    """Join the process group and run rounds until the harness sends `quit`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="the tensors to move, as in `echelon bench pushpull`")
    parser.add_argument("--process-group", required=True, help="URL of the rendezvous, with rank and world size")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", args.process_group)
    model = FlatModel(num_elements(shapes(args.model)), seed=dist.get_rank())

    def run_round(num_steps: int) -> list[float]:
        dist.barrier()
        return [model.timed_step() for _ in range(num_steps)]

    try:
        serve(run_round)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
