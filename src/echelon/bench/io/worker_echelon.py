"""The process of the Echelon contender of `echelon bench io`: batches of Echelon's loader."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from echelon.bench.io.worker import read_flags, serve_batches
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
    args = read_flags()
    with make_loader(args.rec, args.batch_size, args.threads) as loader:
        batches = forever(loader)
        serve_batches(lambda: next(batches), args.step_batches, loader.wait)


if __name__ == "__main__":
    main()
