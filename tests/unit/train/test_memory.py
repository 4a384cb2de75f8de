"""What is said when GPU memory is exceeded. The GPU is a function here: a step of a batch needs so many bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from echelon.errors import UsageError
from echelon.train.loop.memory import (
    GIB,
    MIB,
    GpuMemory,
    MemoryUse,
    advice,
    explain_memory_errors,
    find_batch,
    is_out_of_memory,
    round_down,
)
from echelon.train.recipe.options import TrainOptions

GPU = GpuMemory("NVIDIA H200", 140 * GIB, GIB // 2)


def gpu_with(available: int, fixed: int, per_sample: int, asked: list[int]) -> Callable[[int], int | None]:
    def peak(batch: int) -> int | None:
        asked.append(batch)
        needed = fixed + batch * per_sample
        return needed if needed <= available else None

    return peak


@pytest.mark.parametrize(("batch", "rounded"), [(1, 1), (7, 7), (15, 15), (17, 16), (100, 96), (1675, 1664)])
def test_round_down(batch: int, rounded: int) -> None:
    assert round_down(batch) == rounded


@pytest.mark.parametrize("batch", [2, 64, 4096, 100_000])
@pytest.mark.parametrize("per_sample", [MIB, 90 * MIB, 3 * GIB])
def test_the_batch_that_is_advised_fits_and_is_not_much_too_small(batch: int, per_sample: int) -> None:
    available, fixed, asked = 40 * GIB, 2 * GIB, list[int]()
    use, fits = find_batch(gpu_with(available, fixed, per_sample, asked), batch, available)
    assert fixed + fits * per_sample <= available
    assert fits in asked, "it was tried"
    assert fits == batch or fixed + fits * per_sample > 0.7 * available
    assert use is not None
    assert (use.fixed, use.per_sample) == pytest.approx((fixed, per_sample))


def test_activations_that_need_more_than_the_line_through_small_batches_says() -> None:
    def peak(batch: int) -> int | None:
        needed = GIB + batch * 10 * MIB + (batch > 1000) * 10 * GIB  # another algorithm for large batches
        return needed if needed <= 16 * GIB else None

    _, fits = find_batch(peak, 4096, 16 * GIB)
    assert peak(fits) is not None
    assert fits > 500


@pytest.mark.parametrize(("fixed", "fits"), [(38, 1), (41, 0)])
def test_one_sample_or_none(fixed: int, fits: int) -> None:
    assert find_batch(gpu_with(40 * GIB, fixed * GIB, 2 * GIB, []), 4096, 40 * GIB) == (None, fits)


def test_the_line_names_the_flag_the_memory_and_what_fits() -> None:
    use = MemoryUse(0.5 * GIB, 87.7 * MIB)
    assert advice(GPU, 4096, 1408, use) == (
        "GPU memory exceeded: --batch-size 4096 does not fit (NVIDIA H200 has 140.0 GiB; a step needs 0.5 GiB for "
        "weights and optimizer and 87.7 MiB per sample); --batch-size 1408 fits"
    )
    busy = GpuMemory("NVIDIA H200", 140 * GIB, 100 * GIB)
    assert "(NVIDIA H200 has 140.0 GiB, of which other processes use 100.0 GiB; " in advice(busy, 4096, 1408, use)
    assert advice(GPU, 512, 176, use, num_devices=8).endswith("--batch-size 1408 fits")
    assert "neither does a batch of one sample" in advice(GPU, 4096, 0, None)
    assert "although a step of --batch-size 128 alone fits" in advice(GPU, 128, 128, use)


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("shape mismatch"), False),
        (UsageError("--lr 0"), False),
    ],
)
def test_which_errors_are_about_memory(error: Exception, is_memory: bool) -> None:
    assert is_out_of_memory(error) == is_memory


def test_other_errors_and_results_are_passed_on() -> None:
    def fail() -> int:
        raise UsageError("--lr 0")

    arguments = TrainOptions(), 10, (1, 8, 8), torch.device("cpu")
    assert explain_memory_errors(lambda: 3, *arguments) == 3
    with pytest.raises(UsageError, match="--lr 0"):
        explain_memory_errors(fail, *arguments)
