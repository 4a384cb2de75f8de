"""Whether other processes of a job use the same GPU. Convolutions are tuned only if none does."""

from __future__ import annotations

import pytest
import torch

from echelon.environment import Job
from echelon.train.loop.network import shares_gpu
from echelon.train.recipe.options import TrainOptions


@pytest.mark.parametrize(
    ("devices", "local_workers", "shared"),
    [
        (("cuda:0",), None, False),
        (("cuda:0",), 1, False),
        (("cuda:0", "cuda:1"), 1, False),
        (("cuda:0", "cuda:0"), 1, True),
        (("cuda:0",), 2, True),
        (("cpu", "cpu"), 2, False),
    ],
)
def test_devices_of_a_worker_and_workers_of_a_machine_share_gpus(
    devices: tuple[str, ...], local_workers: int | None, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    job = Job(local_workers=local_workers)
    assert shares_gpu(TrainOptions(devices=devices), torch.device(devices[0]), job) is shared


def test_workers_with_visible_devices_of_their_own_do_not_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert not shares_gpu(TrainOptions(devices=("cuda:0",)), torch.device("cuda:0"), Job(local_workers=2))
