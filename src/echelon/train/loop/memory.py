"""What a run says when the memory of its GPU is exceeded: what is in use, and which batch size would fit.

Weights, gradients and optimizer states take a fixed amount, activations one that is proportional to the batch. After
the failure everything is freed, and steps with two small batches are made to measure both. The batch size that follows
is tried as well, so that the advice is not only arithmetic.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch

from echelon.errors import UsageError
from echelon.train.loop.network import make_network
from echelon.train.recipe.optimizers import make_optimizer
from echelon.train.recipe.options import TrainOptions
from echelon.train.step.eager import ForwardPass
from echelon.train.step.metrics import Metrics
from echelon.train.step.precision import choose_precision

USABLE = 0.9  # of the memory: the rest is for fragmentation, workspaces of convolutions, and the data
MAX_TRIES = 4
OWN_CONTEXT = 3 << 29  # bytes; the context of this process takes 0.5 to 0.7 GiB
GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The memory of a step in bytes: a fixed part, and one per sample of the batch."""

    fixed: float
    per_sample: float

    @classmethod
    def through(cls, small: tuple[int, int], large: tuple[int, int]) -> MemoryUse:
        """Return the line through two measurements (batch size, bytes)."""
        per_sample = max(1.0, (large[1] - small[1]) / (large[0] - small[0]))
        return cls(max(0.0, small[1] - per_sample * small[0]), per_sample)

    def largest_batch(self, available: float) -> int:
        """Return the largest batch that fits; 0 if none does."""
        return max(0, int((available - self.fixed) // self.per_sample))


def round_down(batch: int) -> int:
    """Return a round number that is at most an eighth smaller: a multiple of a power of two."""
    return batch - batch % (1 << max(0, batch.bit_length() - 4))


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """The memory of a GPU in bytes, for messages."""

    name: str
    total: int
    others: int  # in use by other processes, and by the CUDA context of this one

    def __str__(self) -> str:
        others = f", of which other processes use {self.others / GIB:.1f} GiB" if self.others > OWN_CONTEXT else ""
        return f"{self.name} has {self.total / GIB:.1f} GiB{others}"


def advice(gpu: GpuMemory, batch: int, fits: int, use: MemoryUse | None, *, num_devices: int = 1) -> str:
    """Return the line for a step of `batch` samples that did not fit. `fits` samples do; 0 if none do."""
    flag = f"--batch-size {batch * num_devices}"
    if fits < 1:
        return (
            f"GPU memory exceeded: {flag} does not fit, and neither does a batch of one sample ({gpu}); "
            "use a smaller network or image, or --dtype bfloat16"
        )
    if use is None:
        return f"GPU memory exceeded: {flag} does not fit ({gpu}); --batch-size {fits * num_devices} fits"
    needs = f"{use.fixed / GIB:.1f} GiB for weights and optimizer and {use.per_sample / MIB:.1f} MiB per sample"
    if fits >= batch:
        return (
            f"GPU memory exceeded, although a step of {flag} alone fits ({gpu}; a step needs {needs}); "
            f"use a smaller --batch-size, or end the other processes that use the GPU"
        )
    return (
        f"GPU memory exceeded: {flag} does not fit ({gpu}; a step needs {needs}); "
        f"--batch-size {fits * num_devices} fits"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a GPU's memory was exceeded. CUDA's libraries report it with errors of their own."""
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and ("CUDA error: out of memory" in text or "STATUS_ALLOC_FAILED" in text)
    )


def explain_memory_errors(
    train: Callable[[], int],
    options: TrainOptions,
    num_classes: int,
    image_shape: tuple[int, int, int],
    device: torch.device,
) -> int:
    """Run `train`, and turn its error of exceeded GPU memory into one that says which batch size fits."""
    try:
        return train()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    # Here the error is gone, and with it the frames that held the network and the tensors of the failed step.
    num_devices = len(options.devices)
    batch = options.batch_size // num_devices
    gpu = _measure_gpu(device)
    use, fits = None, 0
    try:
        probe = _Probe(options, num_classes, image_shape, device)
        use, fits = find_batch(probe.peak, batch, gpu.total - gpu.others)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    raise UsageError(advice(gpu, batch, fits, use, num_devices=num_devices))


def find_batch(peak: Callable[[int], int | None], batch: int, available: int) -> tuple[MemoryUse | None, int]:
    """Return the memory of a step, and the largest batch up to `batch` that fits: 0 if not even one sample does.

    `peak` makes a step and returns the memory that it needed in bytes, or None if it did not fit.
    """
    large = max(2, batch // 8)
    while (at_large := peak(large)) is None or (at_small := peak(large // 2)) is None:
        if large == 2:
            return None, 1 if peak(1) is not None else 0
        large = max(2, large // 8)
    use = MemoryUse.through((large // 2, at_small), (large, at_large))
    fits = min(batch, max(large, round_down(use.largest_batch(USABLE * available))))
    for _ in range(MAX_TRIES):
        if peak(fits) is not None:
            return use, fits
        fits = max(large, round_down(fits * 7 // 8))
    return use, large


class _Probe:
    """Makes single steps of a network with any batch size, and measures their memory."""

    def __init__(
        self, options: TrainOptions, num_classes: int, image_shape: tuple[int, int, int], device: torch.device
    ) -> None:
        self._shape, self._device = image_shape, device
        torch.backends.cudnn.benchmark = False
        model = make_network(options, num_classes, image_shape, device).train()
        self._optimizer = make_optimizer(options.optimizer, model, lr=options.lr, momentum=options.momentum)
        precision = choose_precision(options.dtype, device)
        self._forward_pass = ForwardPass(model, precision, Metrics(), options.batch_size)

    def peak(self, batch: int) -> int | None:
        """Return the bytes that a step with this batch size needs, or None if they are not available."""
        self._optimizer.zero_grad()
        _free_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        try:
            self._step(batch)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return None
        return torch.cuda.max_memory_reserved(self._device)

    def _step(self, batch: int) -> None:
        images = torch.zeros((batch, *self._shape), device=self._device).to(memory_format=torch.channels_last)
        labels = torch.zeros(batch, dtype=torch.int64, device=self._device)
        loss, _ = self._forward_pass.run(images, labels)
        loss.backward()
        self._optimizer.step()
        torch.cuda.synchronize(self._device)


def _measure_gpu(device: torch.device) -> GpuMemory:
    _free_cache()
    free, total = torch.cuda.mem_get_info(device)
    own = torch.cuda.memory_reserved(device)
    return GpuMemory(torch.cuda.get_device_name(device), total, max(0, total - free - own))


def _free_cache() -> None:
    gc.collect()
    torch.cuda.empty_cache()
