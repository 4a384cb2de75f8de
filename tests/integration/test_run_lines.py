"""The log lines about evaluations and the end of a run, and the exit when a step fails after a signal."""

from __future__ import annotations

import logging
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.errors import UsageError
from echelon.train.checkpoint.names import find
from echelon.train.loop.fit import fit
from echelon.train.loop.stopping import EXIT_STATUS
from echelon.train.recipe.options import TrainOptions

pytestmark = pytest.mark.numeric

# 1437 samples in batches of 128: 12 steps per epoch.
OPTIONS = TrainOptions(batch_size=128, num_epochs=2, lr=0.1, disp_batches=50, seed=7)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


def where_validated(lines: pytest.LogCaptureFixture) -> list[str]:
    found = (re.fullmatch(r"(.*) Validation-accuracy=[01]\.\d{6}", record.getMessage()) for record in lines.records)
    return [one[1] for one in found if one]


@pytest.mark.parametrize(
    ("every", "where"),
    [
        (5, ["0] Batch [5]", "0] Batch [10]", "0]", "1] Batch [3]", "1] Batch [8]", "1]"]),
        (12, ["0]", "1]"]),
        (0, ["0]", "1]"]),
    ],
)
def test_every_evaluation_is_logged_once(lines: pytest.LogCaptureFixture, every: int, where: list[str]) -> None:
    assert fit(replace(OPTIONS, eval_every=every)) == 0
    assert where_validated(lines) == [f"Epoch[{one}" for one in where]
    assert "training stopped" not in lines.text


@pytest.mark.parametrize(
    ("stopped", "point", "left"),
    [
        pytest.param({"num_epochs": 1}, (1, 0), slice(3, None), id="after an epoch"),
        pytest.param({"target_accuracy": 0.15, "eval_every": 4}, (0, 4), slice(None), id="in an epoch"),
    ],
)
def test_a_resumed_run_evaluates_after_the_same_steps(
    lines: pytest.LogCaptureFixture, tmp_path: Path, stopped: dict[str, Any], point: tuple[int, int], left: slice
) -> None:
    options = replace(OPTIONS, eval_every=5, model_prefix=str(tmp_path / "m"))
    fit(replace(options, model_prefix=None))
    whole = where_validated(lines)
    fit(replace(options, **stopped))
    epoch, steps = point
    assert find(tmp_path / "m")[0].position == (epoch, steps * options.batch_size)
    lines.clear()
    fit(replace(options, resume=True))
    assert where_validated(lines) == whole[left]


def test_a_resumed_run_counts_its_steps_from_the_beginning(lines: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options = replace(OPTIONS, eval_every=8, disp_batches=2, model_prefix=str(tmp_path / "m"))
    fit(replace(options, num_epochs=1))
    fit(replace(options, target_accuracy=0.1, resume=True, tensorboard=str(tmp_path / "board")))
    assert re.fullmatch(r"training stopped: target accuracy 0\.1 reached: 0\.\d{4} after 16 steps", lines.messages[-1])
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    assert [event.step for event in board.Scalars("samples/s")] == [12 + 3]


def test_a_target_reached_in_mid_epoch_stops_the_run_with_that_reason(
    lines: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    options = replace(OPTIONS, num_epochs=5, eval_every=4, target_accuracy=0.15, model_prefix=str(tmp_path / "m"))
    assert fit(options) == 0
    *before, last = lines.messages
    message = re.fullmatch(r"training stopped: target accuracy 0\.15 reached: (0\.\d{4}) after (\d+) steps", last)
    assert message, last
    assert float(message[1]) >= 0.15
    assert where_validated(lines)[-1] == f"Epoch[0] Batch [{message[2]}]"
    assert not any("Train-accuracy" in line for line in before), "the epoch was not gone through"
    assert [one.position for one in find(tmp_path / "m")] == [(0, int(message[2]) * options.batch_size)]


def test_a_target_reached_at_the_end_of_an_epoch_saves_a_checkpoint(
    lines: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    prefix = str(tmp_path / "m")
    assert fit(replace(OPTIONS, num_epochs=5, save_period=5, target_accuracy=0.1, model_prefix=prefix)) == 0
    assert where_validated(lines) == ["Epoch[0]"]
    assert lines.messages[-1].startswith("training stopped: target accuracy 0.1 reached: ")
    assert [one.position for one in find(prefix)] == [(1, 0)]


@pytest.mark.parametrize(("every", "batches"), [(20, [11]), (5, [4, 9, 11]), (6, [5, 11])])
def test_test_io_logs_the_speed_also_at_the_end(
    lines: pytest.LogCaptureFixture, every: int, batches: list[int]
) -> None:
    assert fit(replace(OPTIONS, test_io=True, disp_batches=every)) == 0
    found = [re.fullmatch(r"Batch \[(\d+)\]\tSpeed: \d+\.\d\d samples/sec", line) for line in lines.messages]
    assert [int(one[1]) for one in found if one] == batches


def test_an_unknown_loss_is_reported_once(lines: pytest.LogCaptureFixture) -> None:
    assert fit(replace(OPTIONS, num_examples=64, loss="ce,foo")) == 0
    assert [line for line in lines.messages if "foo" in line and "start with" not in line] == [
        "--loss: unknown loss 'foo' is ignored; choose from ce, nll_loss, nll"
    ]
    assert sum("Validation-cross-entropy" in line for line in lines.messages) == 2


class Spoilt(nn.Module):
    """Fails in its third step, as if a signal to the process group had ended a compiler that the step needs."""

    def __init__(self, features: int, num_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, num_classes)
        self.steps = 0

    def forward(self, images: Tensor) -> Tensor:
        self.steps += self.training
        if self.steps == 3:
            if name := os.environ.get("SPOILT_BY"):
                os.kill(os.getpid(), signal.Signals[name])
            raise RuntimeError("C++ compile error")
        result: Tensor = self.linear(images.flatten(1))
        return result


def spoilt(*, num_classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
    return Spoilt(torch.Size(image_shape).numel(), num_classes)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_step_that_fails_after_a_signal_ends_the_run_and_is_not_saved(
    lines: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("SPOILT_BY", name)
    before = signal.getsignal(signal.SIGTERM)
    options = replace(OPTIONS, network=f"{__name__}:spoilt", save_batches=2, model_prefix=str(tmp_path / "m"))
    assert fit(options) == EXIT_STATUS[name]
    assert lines.messages[-1] == f"training stopped: {name}, in a step that was not finished and is not saved"
    assert [one.position for one in find(tmp_path / "m")] == [(0, 2 * options.batch_size)]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_step_that_fails_without_a_signal_raises_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPOILT_BY", raising=False)
    with pytest.raises(RuntimeError, match=re.escape("C++ compile error")):
        fit(replace(OPTIONS, network=f"{__name__}:spoilt"))


def test_fewer_samples_than_devices_are_rejected_with_both_numbers() -> None:
    options = replace(OPTIONS, benchmark=True, image_shape=(1, 8, 8), num_classes=10, devices=("cpu",) * 4)
    with pytest.raises(UsageError, match="3 samples are too few for 4 devices"):
        fit(replace(options, num_examples=3))
