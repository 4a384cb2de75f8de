"""Record files to batches on a device: that they are the CPU loader's, how fast they come, what a copy costs.

    python -m echelon.bench.io.device --rec photographs.rec --device cuda:0 --threads 16

prints the figures, each with its name. `echelon bench io --device` prints them among its own; this program imports no
more than the loader does.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from statistics import median

import torch
from torch import Tensor

from echelon.bench.io.worker_echelon import CONFIG, forever, make_loader
from echelon.data.loading.device import DeviceLoader
from echelon.data.loading.loader import Loader

COMPARED, WARMUP, COPIES = 8, 8, 20


def device_figures(rec: str, device: str, batch_size: int, threads: int, batches: int = 50) -> dict[str, float]:
    """All figures, by name."""
    there = torch.device(device)
    return {
        "device_max_abs_difference": max_difference(rec, there, batch_size, threads),
        "device_images_per_s": images_per_s(rec, there, batch_size, threads, batches),
        **copy_figures(rec, there, batch_size, threads),
    }


def host_batches(rec: str, device: torch.device, batch_size: int, threads: int) -> Loader:
    """What training on that device copies to it."""
    return make_loader(rec, batch_size, threads, "uint8", pin_memory=device.type == "cuda")


def device_batches(rec: str, device: torch.device, batch_size: int, threads: int) -> DeviceLoader:
    """What training on that device reads."""
    return DeviceLoader(host_batches(rec, device, batch_size, threads), CONFIG, device)


def max_difference(rec: str, device: torch.device, batch_size: int, threads: int) -> float:
    """The largest difference of a pixel between the device's batches and the CPU's; labels must be the same."""
    largest = 0.0
    with (
        closing(device_batches(rec, device, batch_size, threads)) as arriving,
        make_loader(rec, batch_size, threads) as floats,
    ):
        pairs = zip(forever(arriving), forever(floats), strict=False)
        for (images, labels), (expected, expected_labels) in islice(pairs, COMPARED):
            if not torch.equal(labels.cpu(), expected_labels):
                raise AssertionError(f"labels on {device} are {labels.tolist()}, not {expected_labels.tolist()}")
            largest = max(largest, float((images.cpu() - expected).abs().max()))
    return largest


def images_per_s(rec: str, device: torch.device, batch_size: int, threads: int, batches: int) -> float:
    """How fast batches arrive when nobody computes; those that were made ahead of time do not count."""
    with closing(device_batches(rec, device, batch_size, threads)) as arriving:
        stream = forever(arriving)
        take(stream, WARMUP, device)
        start = time.perf_counter()
        take(stream, batches, device)
        return round(batches * batch_size / (time.perf_counter() - start), 1)


def take(stream: Iterator[tuple[Tensor, Tensor]], count: int, device: torch.device) -> None:
    """Take some batches and wait until they are there."""
    for _ in islice(stream, count):
        pass
    synchronize(device)


def copy_figures(rec: str, device: torch.device, batch_size: int, threads: int) -> dict[str, float]:
    """Milliseconds until a batch of the loader's is there, and until the call returns; and of plain memory its size."""
    found: dict[str, float] = {}
    with host_batches(rec, device, batch_size, threads) as loader:
        batch = next(loader.raw_batches()).images
        loader.wait()
        if device.type == "cuda":
            found["batch_is_pinned"] = float(batch.is_pinned())
        for name, memory in (("batch", batch), ("pageable", batch.clone())):
            call, whole = time_copies(memory, device)
            found |= {f"copy_{name}_ms": whole, f"copy_{name}_call_ms": call}
    return found


def time_copies(memory: Tensor, device: torch.device) -> tuple[float, float]:
    """Medians of the call alone and of the whole copy, in milliseconds."""
    calls, wholes = [], []
    for _ in range(COPIES):
        synchronize(device)
        start = time.perf_counter()
        arrived = memory.to(device, non_blocking=True, copy=True)
        calls.append(time.perf_counter() - start)
        synchronize(device)
        wholes.append(time.perf_counter() - start)
        del arrived
    return round(median(calls) * 1e3, 3), round(median(wholes) * 1e3, 3)


def synchronize(device: torch.device) -> None:
    """Wait for all work on a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Print the figures of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rec", required=True)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--batches", type=int, default=50, help="to time")
    args = parser.parse_args()
    figures = device_figures(args.rec, args.device, args.batch_size, args.threads, args.batches)
    for name, value in figures.items():
        print(f"{name}: {value:,.7g}")


if __name__ == "__main__":
    main()
