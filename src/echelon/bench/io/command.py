"""`echelon bench io`: record files to float batches of 3x224x224, with random crop and mirror, beside MXNet.

A step is `--step-batches` batches taken one after another, while the loader works ahead. A turn ends when
its loader has stopped working ahead, and begins with steps that use up what was made so, which are not counted: MXNet
makes 17 batches. `--cached` and `--memory` measure two promises besides: images/s of a CIFAR-sized set kept decoded,
and the memory of a run against that of one ten times as long. `--device` compares and times batches on a GPU.
Only what the command line needs is imported at the top, so that other commands start quickly.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.errors import UsageError

if TYPE_CHECKING:
    from echelon.bench.harness.alternate import Case, Contender

PEERS = ("mxnet",)
SETTINGS = ("rec", "images", "restart_interval", "batch_size", "threads", "step_batches", "rounds", "steps", "warmup")
CACHED_IMAGES, CACHED_BATCH = 50_000, 128
MEMORY_BATCHES = 30


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `io` to the benchmarks."""
    parser = subparsers.add_parser("io", help="time record files to augmented batches, beside MXNet")
    parser.add_argument("--rec", metavar="FILE", help="record file of images; without it one is made for the run")
    parser.add_argument("--images", type=int, default=1000, metavar="N", help="images in the file that is made")
    parser.add_argument(
        "--restart-interval", type=int, default=4, metavar="N", help="of that file, as in `data im2rec` (%(default)s)"
    )
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2, help="decoding processes of Echelon, threads of its peer")
    parser.add_argument("--peer", action="append", choices=PEERS, default=[], help="run it too")
    parser.add_argument("--step-batches", type=int, default=4, metavar="N", help="batches in a step")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each contender")
    parser.add_argument("--steps", type=int, default=6, help="timed steps in a turn")
    parser.add_argument("--warmup", type=int, default=6, help="steps before those, in each turn: above 17 batches")
    parser.add_argument("--cached", action="store_true", help="also: images/s of a CIFAR-sized set kept decoded")
    parser.add_argument("--memory", action="store_true", help="also: memory growth over a run ten times as long")
    parser.add_argument("--device", metavar="NAME", help="also: batches on cuda:0 or cpu, compared with those here")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark that the command line describes."""
    for name in ("images", "batch_size", "threads", "step_batches"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    with tempfile.TemporaryDirectory(prefix="echelon-bench-") as folder:
        compete(args, Path(folder))
    return 0


def compete(args: argparse.Namespace, folder: Path) -> None:
    """Measure what is asked for, one thing at a time; show and write the figures."""
    from echelon.bench.harness.alternate import alternate, ratios, summarise
    from echelon.bench.harness.results import print_table, write_json

    rec = args.rec or make_file(folder, args.images, args.restart_interval)
    besides: dict[str, float] = {}
    if args.cached:
        besides["cached_cifar_images_per_s"] = cached_images_per_s()
    if args.memory:
        besides["memory_growth_mb"] = memory_growth_mb(rec, args.batch_size, args.threads)
    if args.device is not None:
        from echelon.bench.io.device import device_figures

        besides |= device_figures(rec, args.device, args.batch_size, args.threads)
    with ExitStack() as running:
        contenders = make_contenders(args, rec, folder)
        for contender in contenders:
            running.enter_context(contender)
        cases = summarise(alternate(contenders, args.rounds, args.steps, args.warmup))
    print_table(f"io: {args.step_batches} batches of {args.batch_size} a step", cases, ratios(cases))
    per_s = speeds(cases, args.batch_size * args.step_batches)
    for name, value in {**per_s, **besides}.items():
        print(f"{name}: {value:,.7g}")
    if args.json is not None:
        settings = {name: getattr(args, name) for name in SETTINGS}
        write_json(args.json, cases, ratios(cases), {**settings, **per_s, **besides})


def make_file(folder: Path, count: int, restart_interval: int) -> str:
    """Make the record file of a run."""
    from echelon.bench.io.images import ENCODING, write_photographs

    encoding = replace(ENCODING, restart_interval=restart_interval)
    return str(write_photographs(folder / "photographs.rec", count, encoding=encoding))


def make_contenders(args: argparse.Namespace, rec: str, folder: Path) -> list[Contender]:
    """Echelon first, because ratios are taken against the first. None is started yet."""
    from echelon.bench.harness.mxnet_environment import mxnet_python
    from echelon.bench.harness.process import ProcessContender, ProcessSpec

    what = ["--rec", str(rec), "--batch-size", str(args.batch_size), "--threads", str(args.threads)]
    what += ["--step-batches", str(args.step_batches)]
    programs = {"echelon": [sys.executable, "-m", "echelon.bench.io.worker_echelon"]}
    if "mxnet" in args.peer:
        # -I: the script's own folder has an `io` in it, which must not shadow the standard library's.
        programs["mxnet"] = [str(mxnet_python()), "-I", str(Path(__file__).with_name("worker_mxnet.py"))]
    return [
        ProcessContender(name, [ProcessSpec(name, [*program, *what], driven=True)], folder)
        for name, program in programs.items()
    ]


def speeds(cases: Sequence[Case], images_a_step: int) -> dict[str, float]:
    """Images per second of each contender, by its median step."""
    return {f"{case.name}_images_per_s": round(images_a_step / case.median_ms * 1e3, 1) for case in cases}


def cached_images_per_s(images: int = CACHED_IMAGES, epochs: int = 3) -> float:
    """Take whole epochs of 32x32 images kept decoded: pad by 4, crop 28x28, mirror. The best epoch counts."""
    import numpy as np

    from echelon.data.images.config import IMAGENET_MEAN, AugmentConfig
    from echelon.data.loading.memory import MemoryLoader, MemorySource
    from echelon.data.loading.order import Sampling

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
    """Return by how much the loader's processes grow between `batches` batches and ten times as many more."""
    import psutil

    from echelon.bench.io.worker_echelon import forever, make_loader

    own = psutil.Process()

    def memory() -> int:
        """Batches are shared and count once; pages of the file are shared and do not count."""
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
