"""The process of the Echelon contender of `echelon bench io`: a step takes some batches from the loader.

A turn ends when the loader has stopped working ahead, as for MXNet (`worker_mxnet` says why).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from torch import Tensor

from echelon.bench.harness.protocol import serve, timed
from echelon.data.images.config import IMAGENET_MEAN, AugmentConfig
from echelon.data.loading.loader import Batches, Loader, Output
from echelon.data.loading.order import Sampling
from echelon.data.loading.sources import RecordSource

CONFIG = AugmentConfig((3, 224, 224), random_crop=True, random_mirror=True, rgb_mean=IMAGENET_MEAN)


def make_loader(
    rec: str, batch_size: int, threads: int, output: Output = "float32", *, pin_memory: bool = False
) -> Loader:
    """Return a loader of shuffled full batches of 3x224x224 with random crop and mirror."""
    source = RecordSource(rec)
    sampling = Sampling(len(source), batch_size, last_batch="wrap")
    return Loader(source, CONFIG, sampling, threads=threads, processes=True, output=output, pin_memory=pin_memory)


def forever(batches: Batches) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of one epoch after another."""
    while True:
        yield from batches


def main() -> None:
    """Run rounds until the harness sends `quit`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rec", required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--step-batches", type=int, required=True)
    args = parser.parse_args()
    with make_loader(args.rec, args.batch_size, args.threads) as loader:
        batches = forever(loader)

        def step() -> None:
            for _ in range(args.step_batches):
                next(batches)

        def run_round(num_steps: int) -> list[float]:
            step_s = [timed(step) for _ in range(num_steps)]
            loader.wait()
            return step_s

        serve(run_round)


if __name__ == "__main__":
    main()
