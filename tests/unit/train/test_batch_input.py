"""Batches reach a captured step through one fixed buffer, or are gathered by a loader on the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from echelon.data.images.config import AugmentConfig
from echelon.data.loading.device import DeviceMemoryLoader
from echelon.data.loading.memory import MemorySource
from echelon.data.loading.order import Sampling
from echelon.train.step.forward import BatchInput

pytestmark = pytest.mark.numeric

CPU = torch.device("cpu")


def batch(value: float) -> tuple[Tensor, Tensor]:
    return torch.full((2, 3, 4, 4), value), torch.full((2,), int(value))


def device_loader() -> DeviceMemoryLoader:
    generator = np.random.default_rng(0)
    source = MemorySource(generator.integers(0, 256, (8, 4, 4, 3), dtype=np.uint8), np.arange(8))
    return DeviceMemoryLoader(source, AugmentConfig(shape=(3, 4, 4)), Sampling(8, 4), CPU)


def test_every_batch_is_copied_into_the_same_memory() -> None:
    buffered = BatchInput(CPU)
    addresses = set()
    for value in (1.0, 2.0, 3.0):
        buffered.copy_in(batch(value))
        images, labels = buffered.read()
        assert torch.equal(images, batch(value)[0])
        assert torch.equal(labels, batch(value)[1])
        addresses.add((images.data_ptr(), labels.data_ptr()))
    assert len(addresses) == 1


def test_the_same_batch_is_copied_once() -> None:
    buffered, synthetic = BatchInput(CPU), batch(1.0)
    for _ in range(3):
        buffered.copy_in(synthetic)
        images, _ = buffered.read()
        images.zero_()
        buffered.copy_in(synthetic)
        assert not images.any()
        buffered.copy_in(batch(2.0))
        assert images.all()


def test_a_loader_on_the_device_gathers_batches_itself() -> None:
    gathered, expected = BatchInput(CPU), list(device_loader())
    found = []
    for nothing in gathered.batches(device_loader()):
        assert nothing is None
        found.append(gathered.read())
    assert len(found) == len(expected) == 2
    for ours, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
