"""How many threads torch uses in one process of a run: a share of the machine's cores, and not more than help.

The number depends on the machine, the job and the network, never on the load of the machine: sums are rounded
differently with another number of threads, and a repeated run must give the same bits.

With all cores, an epoch of train_mnist.py took 4 to 12 s on a busy machine with two cores, with one thread 0.1 to
0.3 s: its operations take microseconds, and each waited until every thread had had its turn on a core. On two cores
shared with twelve other busy processes, a step took (ms; `active` waits in a loop, `passive` sleeps):

    network, batch    million operations   1 thread   2 threads, passive   2 threads, active
    mlp, 64                           14        1.7                  7.0                  44
    digits-cnn, 32                    39         11                   46                 264
    lenet, 64                        294        126                   97                 644

The table was measured once with a throw-away script; no command prints it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from echelon.data.loading.sources import is_work_for_processes
from echelon.data.sets.builtin import SyntheticSource
from echelon.data.sets.datasets import Dataset
from echelon.environment import Job, user_threads
from echelon.system import usable_cores
from echelon.train.recipe.options import TrainOptions

log = logging.getLogger(__name__)

OPERATIONS_PER_THREAD = 100_000_000  # of a forward pass: a few milliseconds on one core


@dataclass(frozen=True, slots=True)
class Threads:
    """A number of threads, and the reason for the log."""

    number: int
    reason: str

    def __str__(self) -> str:
        return f"{self.number} thread{'s' if self.number > 1 else ''}: {self.reason}"


def choose_threads(
    cores: int,
    num_processes: int,
    *,
    operations: int | None = None,
    num_decoders: int = 0,
    by_user: int | None = None,
) -> Threads:
    """Return the threads of one of `num_processes` processes that share `cores`.

    `operations` of the forward pass of a step, if known, limit the number: more threads than work only wait for each
    other. `num_decoders` are processes that decode images for a GPU, which get their cores first. `by_user`: the user
    has set OMP_NUM_THREADS.
    """
    if by_user is not None:
        return Threads(by_user, "OMP_NUM_THREADS")
    share = max(1, (cores - num_decoders) // num_processes)
    useful = share if operations is None else max(1, operations // OPERATIONS_PER_THREAD)
    if useful < share:
        millions = f"{(operations or 0) / 1e6:.3g} million operations"
        return Threads(
            useful, f"the forward pass of a step has {millions}, too few for more (OMP_NUM_THREADS overrides)"
        )
    shared = [f"{num_processes} processes of this job share"] if num_processes > 1 else []
    decoding = [f"{num_decoders} decoding processes use"] if num_decoders else []
    others = f", which {' and '.join(shared + decoding)}" if shared or decoding else ""
    return Threads(share, f"this machine has {cores} core{'s' if cores > 1 else ''}{others}")


def count_operations(model: nn.Module, image_shape: Sequence[int]) -> int | None:
    """Return the floating-point operations of a forward pass for one image, or None if they cannot be counted.

    Only shapes are computed, on torch's meta device. That fails for a network whose path depends on its values.
    """
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            deepcopy(model).to("meta").eval()(torch.zeros(1, *image_shape, device="meta"))
    except Exception:
        return None
    return counter.get_total_flops() or None


def set_threads(options: TrainOptions, job: Job, dataset: Dataset, model: nn.Module, device: torch.device) -> None:
    """Set the number of threads of this process, and log it with the reason."""
    on_gpu, source = device.type == "cuda", dataset.train
    decodes = on_gpu and not isinstance(source, SyntheticSource) and is_work_for_processes(source)
    per_image = None if on_gpu else count_operations(model, dataset.image_shape)
    batch = -(-options.batch_size // len(options.devices))
    threads = choose_threads(
        usable_cores(),
        (job.local_workers or 1) * len(options.devices),
        operations=None if per_image is None else per_image * batch,
        num_decoders=options.data_nthreads if decodes else 0,
        by_user=None if job.local_workers else user_threads(),
    )
    torch.set_num_threads(threads.number)
    if job.device_index == 0:
        log.info(str(threads))


def limit_threads(model: nn.Module, image_shape: Sequence[int], batch_size: int, device: torch.device) -> None:
    """Set the number of threads of a process that only evaluates a model; on a GPU it stays."""
    if device.type == "cuda":
        return
    per_image = count_operations(model, image_shape)
    operations = None if per_image is None else per_image * batch_size
    torch.set_num_threads(choose_threads(usable_cores(), 1, operations=operations, by_user=user_threads()).number)
