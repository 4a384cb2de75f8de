"""`echelon bench io`: record files to float batches of 3x224x224, with random crop and mirror, measured beside MXNet.

A step takes `--step-batches` batches while the loader works ahead. A turn ends when the loader has stopped working
ahead. The batches that it has prepared until then (MXNet prepares 17) are used up by the untimed steps at the start of
the next turn.

Three flags add figures. `--cached`: images per second of a CIFAR-sized set kept decoded. `--memory`: the growth of
memory over a run ten times as long. `--device`: correctness and speed of batches on a GPU.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import psutil

from echelon.bench.harness.checks import check_numbers, check_turns
from echelon.bench.harness.results import figures, print_times, write_result
from echelon.bench.harness.turns import Case, Contender, measure
from echelon.bench.io.contenders import PEERS, IoPlan, echelon
from echelon.bench.io.device import device_figures
from echelon.bench.io.images import ENCODING, write_photographs
from echelon.bench.io.worker_echelon import forever, make_loader
from echelon.data.images.config import IMAGENET_MEAN, AugmentConfig
from echelon.data.loading.memory import MemoryLoader, MemorySource
from echelon.data.loading.order import Sampling

SETTINGS = ("rec", "images", "restart_interval", "batch_size", "threads", "step_batches", "rounds", "steps", "warmup")
CACHED_IMAGES, CACHED_BATCH = 50_000, 128
MEMORY_BATCHES = 30


def run(args: argparse.Namespace) -> int:
    """Run the benchmark that the command line describes."""
    check_numbers(args, images=1, batch_size=1, threads=1, step_batches=1, restart_interval=0)
    check_turns(args)
    with tempfile.TemporaryDirectory(prefix="echelon-bench-") as folder:
        rec = args.rec or make_file(Path(folder), args.images, args.restart_interval)
        more = more_figures(args, rec)
        compare(make_contenders(args, rec, Path(folder)), args, more)
    return 0


def make_file(folder: Path, count: int, restart_interval: int) -> str:
    """Write the record file of a run and return its path."""
    encoding = replace(ENCODING, restart_interval=restart_interval)
    return str(write_photographs(folder / "photographs.rec", count, encoding=encoding))


def make_contenders(args: argparse.Namespace, rec: str, folder: Path) -> list[Contender]:
    """Return Echelon, which ratios refer to, and the requested peers. None of them is started yet."""
    plan = IoPlan(
        rec=rec, batch_size=args.batch_size, threads=args.threads, step_batches=args.step_batches, work_dir=folder
    )
    return [echelon(plan), *(PEERS[name](plan) for name in args.peer)]


def compare(contenders: Sequence[Contender], args: argparse.Namespace, more: dict[str, float]) -> None:
    """Measure the contenders in turns, print the figures and write the result file."""
    cases = measure(contenders, args.rounds, args.steps, args.warmup)
    print_times(f"io: {args.step_batches} batches of {args.batch_size} per step", cases)
    per_s = {**speeds(cases, args.batch_size * args.step_batches), **more}
    for name, value in per_s.items():
        print(f"{name}: {value:,.7g}")
    if args.json is not None:
        settings = {name: getattr(args, name) for name in SETTINGS}
        write_result(args.json, {"settings": {**settings, **per_s}, **figures(cases)})


def speeds(cases: Sequence[Case], images_per_step: int) -> dict[str, float]:
    """Return the images per second of each contender at its median step."""
    return {f"{case.name}_images_per_s": round(images_per_step / case.median_ms * 1e3, 1) for case in cases}


def more_figures(args: argparse.Namespace, rec: str) -> dict[str, float]:
    """Return the figures that `--cached`, `--memory` and `--device` ask for."""
    found: dict[str, float] = {}
    if args.cached:
        found["cached_cifar_images_per_s"] = cached_images_per_s()
    if args.memory:
        found["memory_growth_mb"] = memory_growth_mb(rec, args.batch_size, args.threads)
    if args.device is not None:
        found |= device_figures(rec, args.device, args.batch_size, args.threads)
    return found


def cached_images_per_s(images: int = CACHED_IMAGES, epochs: int = 3) -> float:
    """Return the speed of the best epoch over decoded 32x32 images: pad by 4, crop to 28x28, mirror."""
    pixels = np.random.default_rng(0).integers(0, 256, (images, 32, 32, 3), np.uint8)
    config = AugmentConfig((3, 28, 28), random_crop=True, random_mirror=True, pad_size=4, rgb_mean=IMAGENET_MEAN)
    source = MemorySource(pixels, np.zeros(images, np.int64))
    loader = MemoryLoader(source, config, Sampling(images, CACHED_BATCH))
    best = 0.0
    for _ in range(epochs):
        start = time.perf_counter()
        taken = sum(len(labels) for _, labels in loader)
        best = max(best, taken / (time.perf_counter() - start))
    return round(best, 1)


def memory_growth_mb(rec: str, batch_size: int, threads: int, batches: int = MEMORY_BATCHES) -> float:
    """Return by how much the loader's processes grow from `batches` batches to eleven times as many."""
    own = psutil.Process()

    def memory() -> int:
        """Count shared batches once, in this process; do not count the shared pages of the record file."""
        shares: list[int] = [process.memory_full_info().uss for process in own.children(recursive=True)]
        return int(own.memory_info().rss) + sum(shares)

    with make_loader(rec, batch_size, threads) as loader:
        stream = forever(loader)
        for _ in islice(stream, batches):
            pass
        before = memory()
        for _ in islice(stream, 10 * batches):
            pass
        return round((memory() - before) / 1e6, 1)
