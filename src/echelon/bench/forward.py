"""The speed of forward passes by network and batch size, with the names and lines of MXNet's benchmark_score.py."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from echelon import models
from echelon.errors import UsageError
from echelon.train.loop.network import prepare_device

log = logging.getLogger(__name__)

NETWORKS = (
    *("alexnet", "vgg-16", "resnetv1-50", "resnet-50", "resnet-152", "inception-bn", "inception-v3", "inception-v4"),
    *("inception-resnet-v2", "mobilenet"),
)
BATCH_SIZES = (1, 32, 64, 128, 256)
WARM_UP, TIMED = 5, 10  # batches
_DTYPES = {"cpu": (torch.float32,), "cuda": (torch.float32, torch.float16)}  # as MXNet: no float16 on a CPU
_WITH_DEPTH = ("vgg", "resnet", "resnetv1")
_LARGE_IMAGES = ("inception-v3", "inception-v4")
_GLUON = ("densenet121", "squeezenet1.1")


def log_speeds(networks: Sequence[str], batch_sizes: Sequence[int]) -> None:
    """Log the speed of every network, on the first GPU if there is one, and on the CPU."""
    devices = [torch.device("cuda:0")] if torch.cuda.is_available() else []
    for name in networks:
        log.info("network: %s", name)
        for device in [*devices, torch.device("cpu")]:
            log.info("device: %s", f"{'gpu' if device.type == 'cuda' else 'cpu'}(0)")
            for batch_size, dtype, speed in speeds(name, device, batch_sizes):
                shown = str(dtype).removeprefix("torch.")
                log.info("batch size %2d, dtype %s, images/sec: %f", batch_size, shown, speed)


def speeds(name: str, device: torch.device, batch_sizes: Sequence[int]) -> Iterator[tuple[int, torch.dtype, float]]:
    """Yield (batch size, dtype, images per second) of a network on a device."""
    network, num_layers, image_shape = parse_name(name)
    prepare_device(device)
    model = models.build(network, num_classes=1000, image_shape=image_shape, num_layers=num_layers).eval()
    for batch_size in batch_sizes:
        for dtype in _DTYPES[device.type]:
            model = model.to(device, dtype, memory_format=torch.channels_last)  # type: ignore[call-overload]
            images = torch.rand(batch_size, *image_shape, device=device).mul_(2).sub_(1)
            images = images.to(dtype, memory_format=torch.channels_last)
            yield batch_size, dtype, batch_size * TIMED / seconds(model, images)


def seconds(model: nn.Module, images: torch.Tensor) -> float:
    """Return how long the timed batches take; each is awaited before the next one."""
    start = 0.0
    with torch.inference_mode():
        for batch in range(WARM_UP + TIMED):
            if batch == WARM_UP:
                start = time.perf_counter()
            model(images)
            if images.is_cuda:
                torch.cuda.synchronize(images.device)
    return time.perf_counter() - start


def parse_name(name: str) -> tuple[str, int | None, tuple[int, int, int]]:
    """Return the network, its number of layers and its image shape for a name such as resnet-50."""
    if name in _GLUON:
        raise UsageError(f"--network {name} is in MXNet's Gluon model zoo, but not among Echelon's networks")
    size = 299 if name in _LARGE_IMAGES else 224
    network, dash, depth = name.rpartition("-")
    if dash and network in _WITH_DEPTH and depth.isdecimal():
        return network, int(depth), (3, size, size)
    return name, None, (3, size, size)
