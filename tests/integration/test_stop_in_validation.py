"""Signals during validation end it at once, and the run like a signal in a step: saved, with the status of the signal.

The network of these tests validates slowly: in eval mode it waits for minutes, after it has sent itself a signal or has
said that it waits.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.train.checkpoint.format import load
from echelon.train.checkpoint.names import RESULT_FILE, find
from echelon.train.loop.fit import fit
from echelon.train.loop.stopping import EXIT_STATUS
from echelon.train.recipe.options import TrainOptions
from jobs import Job, until
from tiny_data import make_data

pytestmark = pytest.mark.numeric

SLOW_S = 300.0
PROMPT_S = 60.0  # much less than SLOW_S, much more than a busy machine needs
EXAMPLES = Path(__file__).parents[2] / "examples" / "image-classification"
OPTIONS = TrainOptions(network=f"{__name__}:slow", batch_size=32, num_epochs=2, num_examples=320, seed=7)


class Slow(nn.Module):
    """A linear network whose validation number SLOW_VALIDATION does not end; with SLOW_SIGNAL it gets that signal."""

    def __init__(self, features: int, num_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, num_classes)
        self.validations = 0

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = self.linear(images.flatten(1))
        if not self.training and len(images) > 2:  # smaller batches only check the network
            self.validations += 1
            if self.validations == int(os.environ.get("SLOW_VALIDATION", "0")):
                self._wait()
        return result

    def _wait(self) -> None:
        if name := os.environ.get("SLOW_SIGNAL"):
            os.kill(os.getpid(), signal.Signals[name])
        print("waiting in validation", flush=True)
        time.sleep(SLOW_S)


def slow(*, num_classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
    return Slow(torch.Size(image_shape).numel(), num_classes)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize(
    ("changed", "validation", "positions"),
    [
        pytest.param({}, 1, [(1, 0)], id="after an epoch"),
        pytest.param({"save_period": 2}, 1, [(1, 0)], id="after an epoch that is not saved"),
        pytest.param({}, 2, [(2, 0), (1, 0)], id="after the last epoch"),
        pytest.param({"eval_every": 4}, 1, [(0, 128)], id="in mid-epoch"),
        pytest.param({"ema_epochs": 0.5}, 1, [(1, 0)], id="of the average"),
    ],
)
def test_a_signal_ends_validation_and_the_run_is_saved(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lines: pytest.LogCaptureFixture,
    name: str,
    changed: dict[str, Any],
    validation: int,
    positions: list[tuple[int, int]],
) -> None:
    options = replace(OPTIONS, model_prefix=str(tmp_path / "m"), **changed)
    monkeypatch.setenv("SLOW_VALIDATION", str(validation))
    monkeypatch.setenv("SLOW_SIGNAL", name)
    began = time.monotonic()
    assert fit(options) == EXIT_STATUS[name]
    assert time.monotonic() - began < PROMPT_S
    assert lines.messages[-1] == f"training stopped: {name}"
    assert f"validation stopped: {name}" in lines.messages
    assert [one.position for one in find(tmp_path / "m")] == positions
    monkeypatch.delenv("SLOW_VALIDATION")
    stopped = load(find(tmp_path / "m")[0].path)
    assert fit(replace(options, resume=True)) == 0
    assert fit(replace(options, model_prefix=str(tmp_path / "whole"), save_batches=4)) == 0
    parts, whole = (load(find(tmp_path / prefix)[0].path) for prefix in ("m", "whole"))
    assert all(torch.equal(parts.weights[key], whole.weights[key]) for key in whole.weights)
    if stopped.metadata["epoch"] == 2:
        assert all(torch.equal(stopped.weights[key], whole.weights[key]) for key in whole.weights)


def test_a_signal_in_the_last_validation_keeps_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: pytest.LogCaptureFixture
) -> None:
    """The weights are final. Only their accuracy is missing, and the status is that of the signal."""
    monkeypatch.setenv("SLOW_VALIDATION", "3")
    monkeypatch.setenv("SLOW_SIGNAL", "SIGTERM")
    assert fit(OPTIONS, run_dir=str(tmp_path)) == 128 + signal.SIGTERM
    assert lines.messages[-1] == "validation stopped: SIGTERM"
    assert load(tmp_path / RESULT_FILE).metadata["epoch"] == 2


@pytest.mark.parametrize("store", ["dist_sync", pytest.param("dist_async", marks=pytest.mark.long)])
def test_a_job_that_is_interrupted_in_validation_saves_and_ends(tmp_path: Path, store: str) -> None:
    make_data(tmp_path)
    flags = f"--kv-store {store} --network {__name__}:slow --batch-size 4 --num-examples 32 --num-epochs 2"
    command = [sys.executable, str(EXAMPLES / "train_mnist.py"), *shlex.split(flags), "--model-prefix", "model"]
    environment = {"OMP_NUM_THREADS": "1", "SLOW_VALIDATION": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    with Job(tmp_path, num_workers=2, num_servers=1, command=command, environment=environment) as job:
        until(lambda: "waiting in validation" in job.out, "validation", 60)
        job.launcher.send_signal(signal.SIGINT)
        assert job.wait() == 128 + signal.SIGINT
    assert job.err.strip() == "echelon: stopped by SIGINT"
    saved = re.findall(r'\[worker 0\] INFO:root:Saved checkpoint to "(.*)"', job.out)
    assert find(tmp_path / "model")[0].path.name == saved[-1]
    assert "[worker 0] INFO:root:validation stopped: SIGINT" in job.out
    assert "Traceback" not in job.out
