"""Batches on a device: whether they equal the CPU loader's, how fast they arrive, and the cost of a copy.

    python -m echelon.bench.io.device --rec photographs.rec --device cuda:0 --threads 16

prints the figures by name. `echelon bench io --device` prints the same figures beside its own.
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
    """Return all figures by name."""
    target = torch.device(device)
    return {
        "device_max_abs_difference": max_difference(rec, target, batch_size, threads),
        "device_images_per_s": images_per_s(rec, target, batch_size, threads, batches),
        **copy_figures(rec, target, batch_size, threads),
    }


def host_batches(rec: str, device: torch.device, batch_size: int, threads: int) -> Loader:
    """Return the loader whose batches training copies to the device."""
    return make_loader(rec, batch_size, threads, "uint8", pin_memory=device.type == "cuda")


def device_batches(rec: str, device: torch.device, batch_size: int, threads: int) -> DeviceLoader:
    """Return the loader that training on the device reads."""
    return DeviceLoader(host_batches(rec, device, batch_size, threads), CONFIG, device)


def max_difference(rec: str, device: torch.device, batch_size: int, threads: int) -> float:
    """Return the largest difference of a pixel between the device's batches and the CPU's. Labels must be equal."""
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
    """Return how fast batches arrive without computation. Batches that were prepared before the start do not count."""
    with closing(device_batches(rec, device, batch_size, threads)) as arriving:
        stream = forever(arriving)
        take(stream, WARMUP, device)
        start = time.perf_counter()
        take(stream, batches, device)
        return round(batches * batch_size / (time.perf_counter() - start), 1)


def take(stream: Iterator[tuple[Tensor, Tensor]], count: int, device: torch.device) -> None:
    """Take `count` batches and wait until they are on the device."""
    for _ in islice(stream, count):
        pass
    synchronize(device)


def copy_figures(rec: str, device: torch.device, batch_size: int, threads: int) -> dict[str, float]:
    """Return the milliseconds of copying a batch and of the call alone, then both for pageable memory."""
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
    """Return the medians of the call alone and of the whole copy, in milliseconds."""
    calls, wholes = [], []
    for _ in range(COPIES):
        synchronize(device)
        start = time.perf_counter()
        copied = memory.to(device, non_blocking=True, copy=True)
        calls.append(time.perf_counter() - start)
        synchronize(device)
        wholes.append(time.perf_counter() - start)
        del copied
    return round(median(calls) * 1e3, 3), round(median(wholes) * 1e3, 3)


def synchronize(device: torch.device) -> None:
    """Wait for all work on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Print the figures that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rec", required=True)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--batches", type=int, default=50, help="batches to time (%(default)s)")
    args = parser.parse_args()
    figures = device_figures(args.rec, args.device, args.batch_size, args.threads, args.batches)
    for name, value in figures.items():
        print(f"{name}: {value:,.7g}")


if __name__ == "__main__":
    main()
