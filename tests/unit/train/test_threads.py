"""The number of torch's threads: a share of the cores, limited by the work of a step; OMP_NUM_THREADS wins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from echelon import models
from echelon.environment import Job
from echelon.launch.devices import library_variables
from echelon.system import usable_cores
from echelon.train.loop.threads import choose_threads, count_operations, limit_threads

MUCH = 10**12


@pytest.mark.parametrize(
    ("cores", "num_processes", "operations", "num_decoders", "expected"),
    [
        (8, 1, MUCH, 0, "8 threads: this machine has 8 cores"),
        (8, 1, None, 0, "8 threads: this machine has 8 cores"),
        (1, 1, MUCH, 0, "1 thread: this machine has 1 core"),
        (8, 3, MUCH, 0, "2 threads: this machine has 8 cores, which 3 processes of this job share"),
        (2, 5, MUCH, 0, "1 thread: this machine has 2 cores, which 5 processes of this job share"),
        (8, 1, None, 4, "4 threads: this machine has 8 cores, which 4 decoding processes use"),
        (4, 1, None, 9, "1 thread: this machine has 4 cores, which 9 decoding processes use"),
    ],
)
def test_cores_are_shared(
    cores: int, num_processes: int, operations: int | None, num_decoders: int, expected: str
) -> None:
    assert str(choose_threads(cores, num_processes, operations=operations, num_decoders=num_decoders)) == expected


@pytest.mark.parametrize(("operations", "expected"), [(10, 1), (14_000_000, 1), (294_000_000, 2), (900_000_000, 8)])
def test_small_steps_use_few_threads(operations: int, expected: int) -> None:
    assert choose_threads(8, 1, operations=operations).number == expected


def test_the_users_number_wins_over_everything() -> None:
    assert str(choose_threads(2, 4, operations=1, by_user=3)) == "3 threads: OMP_NUM_THREADS"


def test_operations_are_counted_from_shapes() -> None:
    model = models.build("mlp", num_classes=10, image_shape=(1, 28, 28), initializer="default")
    assert count_operations(model, (1, 28, 28)) == 2 * (784 * 128 + 128 * 64 + 64 * 10)
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())


class DependsOnValues(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images if images.sum().item() > 0 else torch.zeros(1)


def test_a_network_that_needs_values_is_not_counted() -> None:
    assert count_operations(DependsOnValues(), (1, 8, 8)) is None
    assert count_operations(nn.Flatten(), (1, 8, 8)) is None


def test_devices_share_the_cores_of_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setattr("echelon.launch.devices.usable_cores", lambda: 16)
    workers = library_variables(Job(), 2, one_machine=True)
    assert (workers["OMP_NUM_THREADS"], workers["ECHELON_LOCAL_WORKERS"]) == ("8", "2")
    assert workers["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_NUM_THREADS", "8")  # as the launcher set it
    devices = library_variables(Job(local_workers=2), 2, num_devices=4, one_machine=True)
    assert devices["OMP_NUM_THREADS"] == "2"


def test_launchers_keep_the_users_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str(usable_cores() + 1))
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    variables = library_variables(Job(), 2, one_machine=True)
    assert "OMP_NUM_THREADS" not in variables
    assert "ECHELON_LOCAL_WORKERS" not in variables
    assert variables["OMP_WAIT_POLICY"] == "ACTIVE"


@pytest.mark.parametrize(("by_user", "expected"), [(None, 1), ("3", 3)])
def test_scoring_a_small_network_uses_one_thread_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, by_user: str | None, expected: int
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if by_user:
        monkeypatch.setenv("OMP_NUM_THREADS", by_user)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        limit_threads(nn.Linear(20, 3), (20,), 64, torch.device("cpu"))
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)
