"""One rank of the Gloo peer: what a plain PyTorch job does with its gradients, at its best.

All-reduce of the flat gradients in 25 MB buckets (DDP's default size), all in flight at once, then one fused SGD with
momentum and weight decay over the flat weights. Run it with `--help` for its arguments; it speaks
`echelon.bench.harness.protocol`.

The sum replaces the gradients in place, so they are written afresh before each step, as backward would; that part is
not timed. There is no barrier between steps: a rank that is late shows in the other's all-reduce.

Tried once, 48 steps each in turn, on a machine that was not quiet: buckets of 8 MB (1.01 of this one's time) or one of
everything (0.98) change nothing. An SGD for each bucket as it arrives took 0.94 (rounds from 0.69 to 1.20), so this may
not be Gloo's best; it is kept as the plain form, and the other should be tried again where it is quiet.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist

from echelon.bench.harness.protocol import serve, timed
from echelon.bench.pushpull.shapes import num_elements, read_shapes

BUCKET_BYTES = 25 * 1024 * 1024


class FlatModel:
    """Weights, gradients and optimizer of a model laid end to end."""

    def __init__(self, size: int, seed: int) -> None:
        self._fresh = torch.randn(size, generator=torch.Generator().manual_seed(seed)).mul_(1e-3)
        self._weights = torch.nn.Parameter(torch.ones(size))
        self._gradients = torch.zeros(size)
        self._weights.grad = self._gradients
        length = BUCKET_BYTES // self._gradients.element_size()
        self._buckets = [self._gradients[start : start + length] for start in range(0, size, length)]
        self._optimizer = torch.optim.SGD([self._weights], lr=0.1, momentum=0.9, weight_decay=1e-4, fused=True)

    def backward(self) -> None:
        """Stand in for the backward pass."""
        self._gradients.copy_(self._fresh)

    def step(self) -> None:
        """Sum the gradients over the ranks and update the weights."""
        for work in [dist.all_reduce(bucket, async_op=True) for bucket in self._buckets]:
            work.wait()
        self._optimizer.step()

    def timed_step(self) -> float:
        """Seconds of a step with fresh gradients."""
        self.backward()
        return timed(self.step)


def main() -> None:
    """Join the group, then serve rounds until told to quit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", type=Path, required=True, help="JSON list of tensor shapes")
    parser.add_argument("--store", type=Path, required=True, help="file through which the ranks find each other")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{args.store}", rank=args.rank, world_size=args.world_size)
    model = FlatModel(num_elements(read_shapes(args.shapes)), seed=args.rank)

    def run_round(num_steps: int) -> list[float]:
        dist.barrier()
        return [model.timed_step() for _ in range(num_steps)]

    try:
        serve(run_round)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
