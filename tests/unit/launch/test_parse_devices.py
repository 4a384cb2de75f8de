"""--gpus and --devices: the devices they mean, and the errors of invalid ones."""

from __future__ import annotations

import pytest
import torch

from echelon.errors import UsageError
from echelon.launch.devices import parse_devices, run_devices


@pytest.fixture
def six_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that this machine has six GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)


@pytest.mark.parametrize(
    ("gpus", "devices", "found"),
    [
        (None, None, ["cpu"]),
        ("", None, ["cpu"]),
        ("", "", ["cpu"]),
        ("0,2,5", None, ["cuda:0", "cuda:2", "cuda:5"]),
        ("3", None, ["cuda:3"]),
        (None, "cpu", ["cpu"]),
        (None, "cpu:4", ["cpu"] * 4),
        (None, "cuda:0,cuda:1", ["cuda:0", "cuda:1"]),
        (None, "cuda", ["cuda:0"]),
        ("0,1,0", None, ["cuda:0", "cuda:1", "cuda:0"]),  # two devices share GPU 0
        (None, "cuda:1,cuda:1", ["cuda:1", "cuda:1"]),
    ],
)
def test_devices(six_gpus: None, gpus: str | None, devices: str | None, found: list[str]) -> None:
    assert parse_devices(gpus, devices) == found


@pytest.mark.parametrize(
    ("gpus", "devices", "message"),
    [
        ("0,6", None, r"--gpus 0,6 asks for GPU 6, but this machine has 6 \(0 to 5\)"),
        (None, "cuda:7", r"--devices cuda:7 asks for GPU 7, but this machine has 6 \(0 to 5\)"),
        ("0;1", None, "--gpus 0;1: '0;1' is not a device number; write for example 0,2,5"),
        ("-1", None, "'-1' is not a device number"),
        ("1", "cpu:2", "--gpus 1 and --devices cpu:2 contradict each other"),
        (None, "cpu:0", "--devices cpu:0: a worker needs at least one device"),
        (None, "cpu:x", "'x' is not a device number; write for example cpu:4"),
        (None, "tpu:1", "--devices 'tpu:1' is neither cpu:COUNT nor a list like cuda:0,cuda:1"),
        (None, "cpu,cuda:0", "is neither cpu:COUNT nor a list"),
    ],
)
def test_invalid_devices(six_gpus: None, gpus: str | None, devices: str | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_devices(gpus, devices)


def test_a_machine_without_gpus_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UsageError, match="asks for GPU 0, but this machine has none that torch can use"):
        parse_devices("0", None)


def test_a_worker_needs_a_device() -> None:
    with pytest.raises(UsageError, match="at least one device, not 0"):
        run_devices(["true"], 0)
