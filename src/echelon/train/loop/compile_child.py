"""`python -m echelon.train.loop.compile_child`: compiles the step of a run in a process beside it.

The process reads a pickled `CompileRequest` from its standard input, builds the network of the run with other weights,
and makes one forward and backward pass with Inductor. This leaves the kernels and their tuning in the cache of the
user (`TORCHINDUCTOR_CACHE_DIR`). The run then compiles the same functions with the same shapes, and only reads the
cache. Dynamo, which takes most of the time in Python, would otherwise hold the interpreter of the run.
"""

from __future__ import annotations

import os
import pickle
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.data.loading.device import DeviceMemoryLoader
from echelon.train.loop.feeds.inputs import open_data, train_loader
from echelon.train.loop.network import make_network, prepare_device
from echelon.train.recipe.options import TrainOptions
from echelon.train.recipe.plan import ProcessRank, sampling_for
from echelon.train.step.eager import ForwardPass
from echelon.train.step.forward import BatchInput, Forward, ForwardInRegions, WholeForward
from echelon.train.step.metrics import Metrics
from echelon.train.step.precision import choose_precision

NICENESS = 10  # the compiler's processes give way to those that prepare the data


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a tensor looks like, without its values."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """Describe a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def zeros(self, device: torch.device) -> Tensor:
        """Return such a tensor."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device).zero_()


@dataclass(frozen=True, slots=True)
class CompileRequest:
    """The step to compile. `buffer` describes the batches from the host; None means that the device has the data."""

    options: TrainOptions
    place: ProcessRank
    device: torch.device
    num_classes: int
    image_shape: tuple[int, int, int]
    batch_size: int  # of one device
    metrics: Metrics
    in_regions: bool
    buffer: tuple[TensorSpec, TensorSpec] | None
    num_threads: int  # of torch, which are part of the key under which kernels are cached
    memory_limit: int | None = None  # bytes on the GPU


def compile_step(request: CompileRequest) -> None:
    """Make one forward and backward pass with compiled kernels."""
    device, options = request.device, request.options
    torch.set_num_threads(request.num_threads)
    prepare_device(device)
    torch.backends.cudnn.benchmark = False  # tuning convolutions would slow the run, which has tuned them already
    if request.memory_limit is not None:
        total = torch.cuda.mem_get_info(device)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, request.memory_limit / total), device)
    model = make_network(options, request.num_classes, request.image_shape, device).train()
    forward_pass = ForwardPass(
        model, choose_precision(options.dtype, device), request.metrics, request.batch_size, options.label_smoothing
    )
    forward: Forward = ForwardInRegions(forward_pass) if request.in_regions else WholeForward(forward_pass)
    _fill(forward.input, request)
    forward.use(torch.compile)
    forward.gather()
    loss, _ = forward()
    loss.backward()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _fill(batch_input: BatchInput, request: CompileRequest) -> None:
    """Give the step a batch, or the loader that makes batches on the device."""
    if request.buffer is not None:
        images, labels = (spec.zeros(request.device) for spec in request.buffer)
        batch_input.buffer = images.normal_(), labels
        return
    dataset = open_data(request.options)
    sampling = sampling_for(request.options, len(dataset.train), request.place, fixed=True)
    loader = train_loader(request.options, dataset, sampling, request.device)
    assert isinstance(loader, DeviceMemoryLoader)
    loader.begin()
    batch_input.loader = loader


if __name__ == "__main__":
    os.nice(NICENESS)
    # An instance of this module's own class: pickle finds the class under the name that the parent imported.
    compile_step(pickle.load(sys.stdin.buffer))
