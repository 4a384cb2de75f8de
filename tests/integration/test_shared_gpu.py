"""Processes that share a GPU: their group is on the CPU, and values are copied there and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from collective_loops import largest_difference
from multi_device_jobs import run
from plain_loops import Loop, Net, joined, momentum, parts_of, seeded
from torch import Tensor

import tolerances
from echelon.kvstore import KVStore
from echelon.kvstore.collective.process_group import ProcessGroup
from echelon.kvstore.multi_device import MultiDeviceStore

needs_gpu = pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU")  # this call does not start CUDA


class Elsewhere(Tensor):
    """A tensor in place of one on a GPU: `to` returns a plain copy."""

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.as_subclass(Tensor).clone()


def collectives(kv: KVStore, make: Any) -> list[list[float]]:
    """Run every collective of a group of two with this rank's values."""
    assert isinstance(kv, MultiDeviceStore)
    group = kv.group
    own = torch.arange(4.0) + 10 * group.rank
    gathered = make(torch.zeros(8))
    sent = make(own.clone())
    group.broadcast([sent], source=1)
    found = [
        group.all_reduce(make(own.clone())).result(),
        group.reduce_scatter(make(own.clone())).result(),
        group.all_gather(make(own.clone()), gathered).result(),
        gathered,
        sent,
    ]
    return [one.as_subclass(Tensor).tolist() for one in found]


def expected(rank: int) -> list[list[float]]:
    sums, both = [10.0, 12.0, 14.0, 16.0], [0.0, 1.0, 2.0, 3.0, 10.0, 11.0, 12.0, 13.0]
    return [sums, sums[2 * rank : 2 * rank + 2], both, both, both[4:]]


def collectives_elsewhere(kv: KVStore) -> list[list[float]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessGroup, "_is_elsewhere", lambda group, tensor: type(tensor) is Elsewhere)
        return collectives(kv, lambda values: values.as_subclass(Elsewhere))


def test_values_on_another_device_are_copied_there_and_back() -> None:
    assert run(collectives_elsewhere, "dist_sync") == [expected(0), expected(1)]


@needs_gpu
def test_two_processes_on_one_gpu() -> None:
    found = run(lambda kv: collectives(kv, Tensor.cuda), "dist_sync", device="cuda:0")
    assert found == [expected(0), expected(1)]


@needs_gpu
def test_lock_step_on_a_shared_gpu_is_one_process_on_the_joined_batch() -> None:
    loop = Loop(seeded(Net), momentum)
    parts = parts_of((3, 4, 1, 5))
    plain = loop.plain(joined(parts))

    def work(kv: KVStore) -> Any:
        torch.backends.cudnn.allow_tf32 = False
        on_gpu = Loop(seeded(Net).cuda(), momentum)
        found = on_gpu.worker(kv, [(images.cuda(), labels.cuda()) for images, labels in parts[kv.rank]])
        return {name: value.cpu() for name, value in found.items()}

    for state in run(work, "dist_sync", sizes=(2, 2, 2), device="cuda:0"):
        assert not isinstance(state, BaseException), state
        assert largest_difference(state, plain) < tolerances.of_training(joined(parts))
