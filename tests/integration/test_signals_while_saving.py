"""Signals at the worst moments, while a checkpoint is written or data is opened: no file is damaged or lost."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import resource
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from echelon.data.sets.datasets import Dataset
from echelon.errors import NOT_WHOLE, DataError
from echelon.train.checkpoint.format import load
from echelon.train.checkpoint.names import RESULT_FILE, find
from echelon.train.loop import fit as fitting
from echelon.train.loop.fit import fit
from echelon.train.loop.stopping import StopSignals
from echelon.train.recipe.options import TrainOptions

pytestmark = [
    pytest.mark.numeric,
    # A signal during validation raises wherever the main thread is, also in a callback of hypothesis.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

OPTIONS = TrainOptions(batch_size=64, num_epochs=3, num_examples=640, seed=7)
CALLS = pytest.mark.parametrize("call", ["fsync", "replace"])  # before and after the contents are on the disk


def signals_at(monkeypatch: pytest.MonkeyPatch, call: str, number: int, *signals: signal.Signals) -> None:
    """Send signals to this process in the given call of `os.fsync` or `os.replace`, counted from 1.

    A thread writes the files, and the main thread handles the signals. Each signal is sent when it has handled the one
    before, because equal signals that wait together count once.
    """
    real: Callable[..., None] = getattr(os, call)
    record, handled = StopSignals._record, threading.Semaphore(0)
    count = 0

    def recorded(self: StopSignals, number: int, frame: object) -> None:
        handled.release()
        record(self, number, frame)

    def interrupted(*arguments: object) -> None:
        nonlocal count
        count += 1
        if count == number:
            for one in signals:
                os.kill(os.getpid(), one)
                assert handled.acquire(timeout=60)
        real(*arguments)

    monkeypatch.setattr(StopSignals, "_record", recorded)
    monkeypatch.setattr(os, call, interrupted)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def final_weights(prefix: Path) -> dict[str, torch.Tensor]:
    return load(find(prefix)[0].path).weights


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of a run without signals."""
    prefix = tmp_path_factory.mktemp("whole") / "m"
    assert fit(replace(OPTIONS, model_prefix=str(prefix))) == 0
    return final_weights(prefix)


def assert_resumes(prefix: Path, whole: dict[str, torch.Tensor]) -> None:
    for name in files(prefix.parent):
        load(prefix.parent / name)  # every file is complete
    assert fit(replace(OPTIONS, model_prefix=str(prefix), resume=True)) == 0
    found = final_weights(prefix)
    assert all(torch.equal(found[name], whole[name]) for name in whole)


@CALLS
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_first_checkpoint_is_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    whole: dict[str, torch.Tensor],
    call: str,
    number: signal.Signals,
) -> None:
    caplog.set_level(logging.INFO)
    with monkeypatch.context() as patch:
        signals_at(patch, call, 1, number)
        assert fit(replace(OPTIONS, model_prefix=str(tmp_path / "m"))) == 128 + number
    assert f'Saved checkpoint to "{tmp_path / "m"}-0001.safetensors"' in caplog.messages
    assert "m-0001.safetensors" in files(tmp_path)
    assert_resumes(tmp_path / "m", whole)


@CALLS
def test_a_second_ctrl_c_while_a_checkpoint_is_written_keeps_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, torch.Tensor], call: str
) -> None:
    second = 3 if call == "fsync" else 2  # the folder is synced, too
    with monkeypatch.context() as patch:
        signals_at(patch, call, second, signal.SIGINT, signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            fit(replace(OPTIONS, model_prefix=str(tmp_path / "m")))
    assert "m-0001.safetensors" in files(tmp_path)
    assert_resumes(tmp_path / "m", whole)


@CALLS
def test_a_signal_while_the_result_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, torch.Tensor], call: str
) -> None:
    with monkeypatch.context() as patch:
        signals_at(patch, call, 1, signal.SIGTERM)
        assert fit(OPTIONS, run_dir=str(tmp_path)) == 128 + signal.SIGTERM
    found = load(tmp_path / RESULT_FILE)
    assert all(torch.equal(found.weights[name], whole[name]) for name in whole)
    assert not [name for name in files(tmp_path) if "partial" in name]


def test_ctrl_c_while_the_data_is_opened_ends_the_process_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(options: TrainOptions) -> Dataset:
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("Ctrl-C had no effect")

    monkeypatch.setattr(fitting, "open_data", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit(replace(OPTIONS, model_prefix=str(tmp_path / "m")))
    assert files(tmp_path) == []


def test_a_full_disk_at_the_end_is_in_the_status_and_the_checkpoint_before_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, whole: dict[str, torch.Tensor]
) -> None:
    """All epochs are trained although no checkpoint after the first can be written."""
    assert fit(replace(OPTIONS, num_epochs=1, model_prefix=str(tmp_path / "m"))) == 0
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    caplog.set_level(logging.INFO)
    try:
        status = fit(replace(OPTIONS, model_prefix=str(tmp_path / "m"), resume=True))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert status == NOT_WHOLE
    assert "Epoch[2] Validation-accuracy" in caplog.text
    errors = [one.getMessage() for one in caplog.records if one.levelno >= logging.ERROR]
    assert [("m-0002" in one, "m-0003" in one) for one in errors] == [(True, False), (False, True), (False, True)]
    assert errors[-1].startswith("the result is not whole: ")
    assert files(tmp_path) == ["m-0001.safetensors"]
    assert_resumes(tmp_path / "m", whole)


def test_a_disk_that_is_full_only_for_a_while_does_not_change_the_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, torch.Tensor]
) -> None:
    real, count = os.fsync, itertools.count(1)

    def full_at_first(number: int) -> None:
        if next(count) == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(number)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_at_first)
        assert fit(replace(OPTIONS, model_prefix=str(tmp_path / "m"))) == 0
    assert files(tmp_path) == ["m-0002.safetensors", "m-0003.safetensors"]
    assert_resumes(tmp_path / "m", whole)


def test_resuming_from_damaged_files_only_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    assert fit(replace(OPTIONS, num_epochs=2, model_prefix=str(tmp_path / "m"))) == 0
    for path in tmp_path.iterdir():
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(DataError, match=r"none of the 2 checkpoints .*m-0002\.safetensors.*m-0001\.safetensors"):
        fit(replace(OPTIONS, model_prefix=str(tmp_path / "m"), resume=True))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
