"""Flat buckets: every parameter has a place, shards are equal and cover all elements, strides are kept."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from echelon.train.trainer.workers.flat_buckets import (
    ALIGN,
    FlatBucket,
    flat_weights,
    is_dense,
    make_flat_buckets,
    shard_of,
)


def parameters() -> dict[str, nn.Parameter]:
    made = {
        "conv": torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last),
        "bias": torch.randn(7),
        "scalar": torch.randn(()),
        "empty": torch.randn(0, 3),
        "long": torch.randn(130, 2),
        "strided": torch.randn(6, 8)[:, ::2],
        "double": torch.randn(9, dtype=torch.float64),
        "half": torch.randn(3, 3).half(),
    }
    return {name: nn.Parameter(tensor) for name, tensor in made.items()}


def buckets_of(size: int, limit: int = 1 << 20) -> list[FlatBucket]:
    return make_flat_buckets(parameters(), size, limit)


@pytest.mark.parametrize("limit", [1, 1000, 1 << 20])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_parameter_has_an_aligned_place_of_its_own(size: int, limit: int) -> None:
    buckets = buckets_of(size, limit)
    assert [name for bucket in buckets for name in bucket.parameters] == list(parameters())
    for bucket in buckets:
        assert len({parameter.dtype for parameter in bucket.parameters.values()}) == 1
        assert bucket.length % (size * ALIGN) == 0
        taken = torch.zeros(bucket.length, dtype=torch.int32)
        for name, parameter in bucket.parameters.items():
            place = bucket.place(taken, name)
            assert place.shape == parameter.shape
            assert bucket.starts[name] % ALIGN == 0
            place += 1
        assert bool((taken <= 1).all()), "places overlap"
        assert int(taken.sum()) == sum(p.numel() for p in bucket.parameters.values())


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_shards_cover_every_element_once(size: int) -> None:
    for bucket in buckets_of(size):
        seen = torch.zeros(bucket.length, dtype=torch.int32)
        for rank in range(size):
            part = shard_of(bucket.length, rank, size)
            for name, chosen in bucket.slices(part).items():
                assert part.start <= chosen.start < chosen.stop <= part.stop
                assert chosen.start >= bucket.starts[name]
                seen[chosen.start : chosen.stop].add_(1)
        wanted = torch.zeros_like(seen)
        for name in bucket.parameters:
            bucket.place(wanted, name).add_(1)
        assert torch.equal(seen, wanted)


def test_gradients_are_collected_in_float32_or_wider_and_missing_ones_are_zero() -> None:
    for bucket in buckets_of(2):
        bucket.gradients.fill_(9.0)
        for name, parameter in bucket.parameters.items():
            parameter.grad = None if name == "bias" else parameter.detach() * 2
        bucket.collect(bucket.parameters.keys() - {"bias"})
        for name, parameter in bucket.parameters.items():
            wanted = torch.zeros_like(parameter) if name == "bias" else parameter.detach() * 2
            assert torch.equal(bucket.places[name], wanted.to(bucket.gradients.dtype)), name
            half = parameter.dtype == torch.float16
            assert bucket.gradients.dtype == (torch.float32 if half else parameter.dtype)


def test_means_are_written_into_the_tensors_that_are_the_gradients() -> None:
    """A loop may hold a gradient, or a view of it. A parameter that only other workers have a gradient for gets one."""
    for bucket in buckets_of(2):
        held = {}
        for name, parameter in bucket.parameters.items():
            parameter.grad = None if name == "bias" else torch.zeros_like(parameter)
            held[name] = parameter.grad
        means = torch.arange(float(bucket.length), dtype=bucket.gradients.dtype) % 64
        bucket.write_gradients(means, bucket.parameters)
        for name, parameter in bucket.parameters.items():
            assert parameter.grad is not None
            assert parameter.grad is held[name] or name == "bias"
            assert torch.equal(parameter.grad, bucket.place(means, name).to(parameter.dtype)), name
            assert parameter.grad.untyped_storage().data_ptr() != means.untyped_storage().data_ptr()


def test_weights_keep_values_and_strides_when_they_move() -> None:
    for bucket in buckets_of(3):
        before = {name: parameter.detach().clone() for name, parameter in bucket.parameters.items()}
        strides = {name: parameter.stride() for name, parameter in bucket.parameters.items() if is_dense(parameter)}
        weights = flat_weights(bucket)
        for name, parameter in bucket.parameters.items():
            assert torch.equal(parameter, before[name]), name
            assert parameter.stride() == strides.get(name, parameter.stride()), name
        weights.fill_(1.0)
        assert all(parameter.eq(1).all() for parameter in bucket.parameters.values())


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.zeros(2, 3), True),
        (torch.zeros(2, 3).t(), True),
        (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.zeros(2, 1, 4)[:, :, 1:2], False),
        (torch.zeros(6, 4)[::2], False),
        (torch.zeros(1).expand(4), False),
        (torch.zeros(()), True),
    ],
)
def test_dense(tensor: torch.Tensor, dense: bool) -> None:
    assert is_dense(tensor) is dense
