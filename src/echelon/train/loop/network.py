"""The network of a run on its device, as the training process and its helpers (`compile_child`, `memory`) build it."""

from __future__ import annotations

import os

import torch
from torch import nn

from echelon import models
from echelon.environment import Job, use_compile_cache
from echelon.errors import UsageError
from echelon.train.recipe.options import TrainOptions
from echelon.train.step.precision import choose_precision


def prepare_device(device: torch.device, *, shared: bool = False) -> None:
    """Choose the folder for compiled kernels; select the GPU, and the settings of its convolutions and matrix products.

    Call it before an optimizer is made: that imports Dynamo, which would choose a folder in /tmp. `shared`: other
    processes of the job use the GPU. Convolutions are then not tuned, because that would time their kernels, too.
    """
    use_compile_cache()
    if device.type != "cuda":
        return
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise UsageError(f"there is no GPU {device.index}; this machine has {torch.cuda.device_count()}")
    torch.cuda.set_device(device)
    torch.backends.cudnn.benchmark = not shared
    torch.backends.cudnn.benchmark_limit = 0  # try all algorithms, not the first ten
    torch.set_float32_matmul_precision("high")


def shares_gpu(options: TrainOptions, device: torch.device, job: Job) -> bool:
    """Return whether other processes of this job use the same GPU: devices of this worker, or workers of this machine.

    Workers of one machine see the same GPUs, unless somebody gave each its own by CUDA_VISIBLE_DEVICES.
    """
    if device.type != "cuda":
        return False
    several_workers = (job.local_workers or 1) > 1 and "CUDA_VISIBLE_DEVICES" not in os.environ
    return several_workers or options.devices.count(str(device)) > 1


def make_network(
    options: TrainOptions, num_classes: int, image_shape: tuple[int, int, int], device: torch.device
) -> nn.Module:
    """Build the network on the device, in the layout of its fastest kernels, and check its outputs on this data."""
    model = models.build(
        options.network,
        num_classes=num_classes,
        image_shape=image_shape,
        num_layers=options.num_layers,
        initializer=options.initializer,
        **options.network_options,
    ).to(device)
    if device.type == "cuda":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with choose_precision(options.dtype, device).autocast():
        models.check_outputs(options.network, model, num_classes=num_classes, image_shape=image_shape, device=device)
    return model
