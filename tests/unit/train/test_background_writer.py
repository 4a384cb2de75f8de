"""Checkpoints in the background: steps go on, one copy exists at a time, and a full disk does not end training."""

from __future__ import annotations

import logging
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from echelon.errors import UsageError
from echelon.train.checkpoint.background import BackgroundWriter
from echelon.train.checkpoint.format import Checkpoint, load

MB = 1 << 20


@pytest.fixture
def small_disk() -> Iterator[None]:
    """Files of this process can have at most 1 MB; a longer write fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MB, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class SlowDisk:
    """Holds every fsync until `release`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = threading.Semaphore(0)
        self._released = threading.Semaphore(0)
        real = os.fsync

        def fsync(number: int) -> None:
            self.begun.release()
            assert self._released.acquire(timeout=60)
            real(number)

        monkeypatch.setattr(os, "fsync", fsync)

    def release(self) -> None:
        self._released.release(1000)


def test_steps_go_on_and_change_the_weights_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, weights, path = SlowDisk(monkeypatch), torch.ones(1000), tmp_path / "m-0001.safetensors"
    saved: list[bool] = []
    with BackgroundWriter() as writer:
        writer.write(path, Checkpoint({"w": weights}), lambda: saved.append(path.exists()))
        assert disk.begun.acquire(timeout=60)
        weights.add_(1)  # a step
        assert not path.exists()
        disk.release()
    assert saved == [True]
    assert torch.equal(load(path).weights["w"], torch.ones(1000))


def test_a_second_checkpoint_waits_for_the_first_so_that_one_copy_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, weights = SlowDisk(monkeypatch), torch.zeros(10)
    paths = [tmp_path / f"m-000{number}.safetensors" for number in (1, 2)]
    with BackgroundWriter() as writer:
        writer.write(paths[0], Checkpoint({"w": weights}))
        assert disk.begun.acquire(timeout=60)
        second = threading.Thread(target=lambda: writer.write(paths[1], Checkpoint({"w": weights})))
        second.start()
        assert not disk.begun.acquire(timeout=0.2), "a second file is written at the same time"
        disk.release()
        second.join()
    assert all(path.exists() for path in paths)


def test_the_memory_of_a_checkpoint_is_used_again_and_each_file_has_its_own_values(tmp_path: Path) -> None:
    sizes = [1000, 1000, 900, 10, 2000, 0, 1000]  # smaller ones, larger ones, and none
    paths = [tmp_path / f"m-{number:04}.safetensors" for number in range(len(sizes))]
    with BackgroundWriter() as writer:
        for number, (size, path) in enumerate(zip(sizes, paths, strict=True)):
            extra = {str(i): torch.full((i,), number) for i in range(number)}
            writer.write(path, Checkpoint({"w": torch.full((size,), float(number))}, extra, metadata={"n": 10**number}))
    for number, (size, path) in enumerate(zip(sizes, paths, strict=True)):
        loaded = load(path)
        assert torch.equal(loaded.weights["w"], torch.full((size,), float(number)))
        assert [(name, tensor.tolist()) for name, tensor in sorted(loaded.optimizer.items())] == [
            (str(i), [number] * i) for i in range(number)
        ]


@pytest.mark.usefixtures("small_disk")
def test_a_full_disk_is_logged_and_training_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = (tmp_path / f"m-000{number}.safetensors" for number in (1, 2))
    reported: list[Path] = []
    with BackgroundWriter(lambda path, reason: reported.append(path)) as writer:
        writer.write(first, Checkpoint({"w": torch.ones(10)}))
        writer.write(second, Checkpoint({"w": torch.zeros(MB)}))
        writer.wait()
        assert list(writer.failures) == reported == [second]
        assert "cannot write the checkpoint" in writer.failures[second]
        assert "File too large" in caplog.text
        assert "Training goes on" in caplog.text
        writer.write(second, Checkpoint({"w": torch.zeros(MB)}))
        writer.wait()
        assert reported == [second], "the same failure of the same file is reported once"
        assert caplog.text.count("Training goes on") == 1
        assert load(first).weights["w"].sum() == 10
        writer.write(second, Checkpoint({"w": torch.ones(3)}))  # there is room again
    assert writer.failures == {}
    assert sorted(os.listdir(tmp_path)) == [first.name, second.name]


def test_ctrl_c_abandons_the_file_that_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, path = SlowDisk(monkeypatch), tmp_path / "m-0001.safetensors"
    with pytest.raises(KeyboardInterrupt), BackgroundWriter() as writer:  # noqa: PT012
        writer.write(path, Checkpoint({"w": torch.ones(10)}))
        assert disk.begun.acquire(timeout=60)
        threading.Timer(0.1, disk.release).start()
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []


def test_an_error_of_the_loop_lets_the_file_be_completed(tmp_path: Path) -> None:
    path = tmp_path / "m-0001.safetensors"
    with pytest.raises(RuntimeError), BackgroundWriter() as writer:  # noqa: PT012
        writer.write(path, Checkpoint({"w": torch.ones(10)}))
        raise RuntimeError
    assert load(path).weights["w"].sum() == 10


def test_a_tensor_that_no_file_can_hold_is_refused_at_once(tmp_path: Path) -> None:
    with BackgroundWriter() as writer, pytest.raises(UsageError, match="weights/z"):
        writer.write(tmp_path / "m-0001.safetensors", Checkpoint({"z": torch.zeros(2, dtype=torch.complex64)}))


def test_a_slow_disk_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echelon.train.checkpoint.background.SLOW_S", 0.0)
    with caplog.at_level(logging.WARNING), BackgroundWriter() as writer:
        for number in (1, 2):
            writer.write(tmp_path / f"m-000{number}.safetensors", Checkpoint({"w": torch.ones(10)}))
    assert "the disk is slower than the interval between checkpoints" in caplog.text
