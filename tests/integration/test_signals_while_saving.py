"""Signals at the worst moments, while a checkpoint is written or data is opened: no file is damaged or lost."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from echelon.data.sets.datasets import Dataset
from echelon.train.checkpoint.format import load
from echelon.train.checkpoint.names import RESULT_FILE, find
from echelon.train.loop import fit as fitting
from echelon.train.loop.fit import fit
from echelon.train.recipe.options import TrainOptions

pytestmark = pytest.mark.numeric

OPTIONS = TrainOptions(batch_size=64, num_epochs=3, num_examples=640, seed=7)
CALLS = pytest.mark.parametrize("call", ["fsync", "replace"])  # before and after the contents are on the disk


def signals_at(monkeypatch: pytest.MonkeyPatch, call: str, number: int, *signals: signal.Signals) -> None:
    """Send signals to this process in the given call of `os.fsync` or `os.replace`, counted from 1."""
    real: Callable[..., None] = getattr(os, call)
    count = 0

    def interrupted(*arguments: object) -> None:
        nonlocal count
        count += 1
        if count == number:
            for one in signals:
                os.kill(os.getpid(), one)
        real(*arguments)

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
    assert files(tmp_path) == ["m-0001.safetensors"]
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
    assert files(tmp_path) == ["m-0001.safetensors"]
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
