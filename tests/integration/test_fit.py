"""The training loop in one process: its log, its checkpoints, and that resuming gives the same bits."""

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
from torch import Tensor

from echelon.errors import DataError, UsageError
from echelon.train.checkpoint import saver as saving
from echelon.train.checkpoint.format import load, save
from echelon.train.checkpoint.names import find, path_for
from echelon.train.loop.fit import fit
from echelon.train.loop.stopping import EXIT_STATUS
from echelon.train.recipe.options import TrainOptions

pytestmark = pytest.mark.numeric

# 1437 samples in batches of 128: 12 steps per epoch, the last with 29 samples.
OPTIONS = TrainOptions(batch_size=128, num_epochs=3, lr=0.1, lr_step_epochs="2", disp_batches=5, seed=7)
STEPS = 12


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


def weights(prefix: Path, epoch: int) -> dict[str, Tensor]:
    checkpoint = load(path_for(prefix, 0, epoch))
    return checkpoint.weights | checkpoint.optimizer


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train three epochs without interruption; returns the prefix of the checkpoints."""
    prefix = tmp_path_factory.mktemp("whole") / "model"
    assert fit(replace(OPTIONS, model_prefix=str(prefix))) == 0
    return prefix


def test_the_log_lines_are_mxnets(lines: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    prefix = tmp_path / "model"
    assert fit(replace(OPTIONS, num_epochs=2, top_k=3, loss="ce", lr_step_epochs="1", model_prefix=str(prefix))) == 0
    text = "\n".join(record.getMessage() for record in lines.records)
    assert re.search(r"^start with arguments Namespace\(data='digits'", text)
    for epoch in (0, 1):
        speeds = re.findall(
            rf"^Epoch\[{epoch}\] Batch \[(\d+-\d+)\]\tSpeed: [\d.]+ samples/sec\taccuracy=[01]\.\d{{6}}"
            r"\ttop_k_accuracy_3=[01]\.\d{6}\tcross-entropy=\d+\.\d{6}$",
            text,
            re.MULTILINE,
        )
        assert speeds == ["0-5", "5-10"]
        assert re.search(rf"^Epoch\[{epoch}\] Train-accuracy=0\.\d{{6}}$", text, re.MULTILINE)
        assert re.search(rf"^Epoch\[{epoch}\] Time cost=\d+\.\d{{3}}$", text, re.MULTILINE)
        assert re.search(rf"^Epoch\[{epoch}\] Validation-accuracy=0\.\d{{6}}$", text, re.MULTILINE)
        assert f'Saved checkpoint to "{prefix}-{epoch + 1:04d}.safetensors"' in text
    assert text.index("Epoch[0] Train-accuracy") < text.index("Epoch[0] Time cost") < text.index("Saved checkpoint")
    assert text.index("Saved checkpoint") < text.index("Epoch[0] Validation-accuracy")
    assert "Update[13]: Change learning rate to 1.00000e-02" in text
    assert re.search(r"^engine eager: ", text, re.MULTILINE)


def test_training_reaches_a_good_accuracy(uninterrupted: Path) -> None:
    metadata = load(path_for(uninterrupted, 0, 3)).metadata
    assert metadata["metrics"]["accuracy"] > 0.8
    assert (metadata["epoch"], metadata["batch"], metadata["network"]) == (3, 0, "digits-cnn")


def test_resuming_from_an_epoch_gives_the_same_bits(uninterrupted: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "model"
    part = replace(OPTIONS, model_prefix=str(prefix))
    fit(replace(part, num_epochs=1))
    fit(replace(part, load_epoch=1))
    assert same(weights(prefix, 3), weights(uninterrupted, 3))


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({}, id="in memory"),
        pytest.param({"mixup": 0.2}, id="mixed"),
        pytest.param({"augment": {"max_random_rotate_angle": 5}}, id="decoded by threads"),
        pytest.param({"benchmark": True, "image_shape": (1, 8, 8), "num_classes": 10, "num_examples": 512}, id="made"),
    ],
)
def test_every_kind_of_loader_resumes_in_mid_epoch_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any]
) -> None:
    options = replace(OPTIONS, batch_size=64, num_epochs=2, save_batches=3, model_prefix=str(tmp_path / "m"), **changed)
    with monkeypatch.context() as patch:
        patch.setattr(saving, "prune", lambda *_, **__: [])  # mid-epoch checkpoints are deleted when the epoch ends
        fit(options)
    whole = weights(tmp_path / "m", 2)
    for end in (2, 1):
        path_for(tmp_path / "m", 0, end).unlink()
    epoch, samples = find(tmp_path / "m")[0].position
    assert epoch == 1
    assert samples >= 3 * 64
    fit(replace(options, resume=True))
    assert same(weights(tmp_path / "m", 2), whole)


def test_mid_epoch_checkpoints_are_deleted_at_the_end_of_the_epoch(tmp_path: Path) -> None:
    fit(replace(OPTIONS, num_epochs=2, save_batches=3, model_prefix=str(tmp_path / "m")))
    assert [one.position for one in find(tmp_path / "m")] == [(2, 0), (1, 0)]


def test_sigterm_saves_and_exits_and_resuming_gives_the_same_bits(
    uninterrupted: Path, tmp_path: Path, lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = tmp_path / "model"
    part = replace(OPTIONS, model_prefix=str(prefix), disp_batches=1)
    from echelon.train import log_lines

    line = log_lines.speed_line

    def tell_and_terminate(epoch: int, first: int, last: int, *rest: object) -> str:
        if (epoch, last) == (1, 4):
            os.kill(os.getpid(), signal.SIGTERM)
        return line(epoch, first, last, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(log_lines, "speed_line", tell_and_terminate)
    assert fit(part) == EXIT_STATUS["SIGTERM"] == 143
    assert [one.position for one in find(prefix)] == [(1, 5 * 128), (1, 0)]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    fit(replace(part, resume=True))
    assert same(weights(prefix, 3), weights(uninterrupted, 3))


def test_a_run_that_is_resumed_with_other_batch_sizes_keeps_its_newest_checkpoint(
    tmp_path: Path, lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Larger batches have lower numbers: files ordered by batches would be deleted as soon as they are written."""
    from echelon.train import log_lines

    options = replace(OPTIONS, num_examples=1280, model_prefix=str(tmp_path / "m"), disp_batches=1)
    line = log_lines.speed_line
    seen: list[tuple[int, str | None]] = []
    for batch_size, last in ((20, 26), (50, 15), (32, 30)):

        def tell_and_terminate(epoch: int, first: int, at: int, *rest: object, last: int = last) -> str:
            if at == last:
                os.kill(os.getpid(), signal.SIGTERM)
            return line(epoch, first, at, *rest)  # type: ignore[arg-type]

        lines.clear()
        monkeypatch.setattr(log_lines, "speed_line", tell_and_terminate)
        assert fit(replace(options, batch_size=batch_size, resume=True)) == EXIT_STATUS["SIGTERM"]
        resumed = next((one for one in lines.messages if one.startswith("resuming")), None)
        newest, *spare = find(tmp_path / "m")
        seen.append((newest.position[1], resumed))
        assert lines.messages[-2] == f'Saved checkpoint to "{newest.path}"'
        assert [one.position[1] for one in spare] == [samples for samples, _ in seen[-2:-1]]
        assert set(tmp_path.iterdir()) == {newest.path, *(one.path for one in spare)}
    assert seen == [
        (540, None),
        (800, "resuming epoch 0 after 500 samples; 40 samples are seen again, because steps have another size now"),
        (992, "resuming epoch 0 after 800 samples"),
    ]


def test_a_damaged_checkpoint_is_named_and_the_newest_valid_one_used(
    uninterrupted: Path, tmp_path: Path, lines: pytest.LogCaptureFixture
) -> None:
    prefix = tmp_path / "model"
    part = replace(OPTIONS, model_prefix=str(prefix))
    fit(replace(part, num_epochs=2))
    newest = path_for(prefix, 0, 2)
    newest.write_bytes(newest.read_bytes()[:5000])
    lines.clear()
    fit(replace(part, resume=True))
    warned = [record.getMessage() for record in lines.records if record.levelno == logging.WARNING]
    assert len(warned) == 1
    assert str(newest) in warned[0]
    assert f"Loaded model {path_for(prefix, 0, 1)}" in lines.text
    assert same(weights(prefix, 3), weights(uninterrupted, 3))
    newest.write_bytes(newest.read_bytes()[:5000])
    with pytest.raises(DataError, match="model-0002"):
        fit(replace(part, load_epoch=2))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"network": "mlp"}, "network digits-cnn there, mlp here"),
        ({"optimizer": "adam"}, "optimizer sgd there, adam here"),
    ],
)
def test_a_checkpoint_of_another_run_is_rejected(uninterrupted: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        fit(replace(OPTIONS, model_prefix=str(uninterrupted), load_epoch=1, **changed))


@pytest.fixture(scope="module")
def middle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on 512 synthetic images that stopped in the middle of its first epoch, after 3 steps."""
    prefix = tmp_path_factory.mktemp("middle") / "m"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "prune", lambda *_, **__: [])
        fit(replace(SHUFFLED, save_batches=3, model_prefix=str(prefix)))
    path_for(prefix, 0, 1).unlink()
    return prefix


SHUFFLED = replace(
    OPTIONS, benchmark=True, image_shape=(1, 8, 8), num_classes=10, num_examples=512, batch_size=128, num_epochs=1
)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 8}, "order: seed 7 there, 8 here. Give"),
        ({"num_examples": 640}, "num_samples 512 there, 640 here; num_examples 512 there, 640 here"),
        ({"benchmark": False}, "order: num_samples 512 there, 1437 here. Give"),
        ({"benchmark": False, "num_examples": None}, "num_examples 512 there, 1437 here"),
    ],
)
def test_a_mid_epoch_position_in_another_order_of_samples_is_rejected(
    middle: Path, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        fit(replace(SHUFFLED, model_prefix=str(middle), resume=True, **changed))
    assert f"{middle}-0000-s0000384.safetensors was saved in the middle of an epoch" in str(refused.value)


def test_a_checkpoint_without_an_order_of_samples_is_accepted(middle: Path, tmp_path: Path) -> None:
    checkpoint = load(path_for(middle, 0, 0, 384))
    older = {name: value for name, value in checkpoint.metadata.items() if name != "order"}
    save(path_for(tmp_path / "m", 0, 0, 384), replace(checkpoint, metadata=older))
    assert fit(replace(SHUFFLED, seed=8, model_prefix=str(tmp_path / "m"), resume=True)) == 0


def test_another_seed_is_accepted_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    part = replace(MADE, image_shape=(1, 8, 8), model_prefix=str(tmp_path / "m"))
    fit(part)
    assert fit(replace(part, seed=8, num_examples=16, num_epochs=2, resume=True)) == 0


# One step of 8 synthetic images.
MADE = replace(OPTIONS, benchmark=True, num_classes=10, num_examples=8, batch_size=8, num_epochs=1)


def test_another_image_shape_is_rejected_if_the_weights_do_not_fit(tmp_path: Path) -> None:
    lenet = replace(MADE, network="lenet", image_shape=(1, 32, 32), model_prefix=str(tmp_path / "lenet"))
    fit(lenet)
    with pytest.raises(UsageError) as refused:
        fit(replace(lenet, image_shape=(1, 28, 28), resume=True))
    assert str(refused.value) == (
        f"{tmp_path / 'lenet'}-0001.safetensors does not fit the network: weight classifier.fc1.weight is (500, 1250) "
        "there, (500, 800) here; images are 1,32,32 there, 1,28,28 here. Give the same flags, or another prefix"
    )
    with pytest.raises(UsageError, match="network options none there, add_stn=True here"):
        fit(replace(lenet, network_options={"add_stn": True}, resume=True))


def test_another_image_shape_is_accepted_if_the_weights_fit(tmp_path: Path) -> None:
    resnet = replace(MADE, network="resnet", num_layers=8, model_prefix=str(tmp_path / "resnet"))
    fit(replace(resnet, image_shape=(3, 8, 8), optimizer="SGD"))
    assert fit(replace(resnet, image_shape=(3, 12, 12), num_epochs=2, resume=True)) == 0, "names are of any case"
    assert load(path_for(tmp_path / "resnet", 0, 2)).metadata["image_shape"] == [3, 12, 12]


def test_a_finished_run_is_reported(uninterrupted: Path, lines: pytest.LogCaptureFixture) -> None:
    before = weights(uninterrupted, 3)
    assert fit(replace(OPTIONS, model_prefix=str(uninterrupted), resume=True)) == 0
    assert "nothing is left to train: 3 of --num-epochs 3 epochs are done" in lines.text
    assert same(weights(uninterrupted, 3), before)


def test_without_a_checkpoint_resume_starts_from_the_beginning(tmp_path: Path, lines: pytest.LogCaptureFixture) -> None:
    assert fit(replace(OPTIONS, num_epochs=1, model_prefix=str(tmp_path / "none"), resume=True)) == 0
    assert "training starts from the beginning" in lines.text


@pytest.mark.parametrize("optimizer", ["adam", "nag", "adadelta", "nadam", "dcasgd", "sgld", "lamb"])
def test_every_optimizer_resumes_with_the_same_bits(tmp_path: Path, optimizer: str) -> None:
    options = replace(OPTIONS, optimizer=optimizer, lr=0.01, num_epochs=2)
    fit(replace(options, model_prefix=str(tmp_path / "whole")))
    fit(replace(options, model_prefix=str(tmp_path / "part"), num_epochs=1))
    fit(replace(options, model_prefix=str(tmp_path / "part"), resume=True))
    assert same(weights(tmp_path / "part", 2), weights(tmp_path / "whole", 2))


def test_mixup_and_smoothing_change_the_training(tmp_path: Path) -> None:
    results = {}
    for name, changed in {"plain": {}, "smooth": {"label_smoothing": 0.1}, "mixed": {"mixup": 0.4}}.items():
        prefix = tmp_path / name
        fit(replace(OPTIONS, num_epochs=1, model_prefix=str(prefix), **changed))  # type: ignore[arg-type]
        results[name] = weights(prefix, 1)
    assert not same(results["plain"], results["smooth"])
    assert not same(results["plain"], results["mixed"])


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float16", marks=pytest.mark.long)])
def test_max_grad_norm_limits_how_far_a_step_moves_the_weights(tmp_path: Path, dtype: str) -> None:
    options = replace(OPTIONS, num_epochs=1, momentum=0.0, weight_decay=0.0, lr_step_epochs="", dtype=dtype)
    found = {}
    for limit in (1e-9, 1e-3, None):
        prefix = tmp_path / str(limit)
        fit(replace(options, max_grad_norm=limit, model_prefix=str(prefix)))
        trained = load(path_for(prefix, 0, 1)).weights
        found[limit] = torch.cat([trained[name].flatten() for name in sorted(trained)])
    moved, free = (float((found[limit] - found[1e-9]).norm()) for limit in (1e-3, None))
    assert 0 < moved < 1.01 * STEPS * options.lr * 1e-3 < free


def test_half_precision_learns_with_float32_weights(tmp_path: Path) -> None:
    for dtype in ("bfloat16", "float16"):
        prefix = tmp_path / dtype
        fit(replace(OPTIONS, dtype=dtype, num_epochs=2, model_prefix=str(prefix)))
        checkpoint = load(path_for(prefix, 0, 2))
        assert checkpoint.metadata["metrics"]["accuracy"] > 0.7
        assert all(t.dtype is torch.float32 for t in checkpoint.weights.values() if t.is_floating_point())
        assert ("loss_scale" in checkpoint.extra) == (dtype == "float16")


def test_monitor_and_test_io(tmp_path: Path, lines: pytest.LogCaptureFixture) -> None:
    fit(replace(OPTIONS, num_epochs=1, monitor=6, num_examples=1024))
    shown = [line for line in lines.text.splitlines() if "Batch:" in line]
    assert shown
    assert all(re.search(r"Batch: +(1|7) \S+ +\d", line) for line in shown)
    lines.clear()
    assert fit(replace(OPTIONS, test_io=True)) == 0
    assert re.search(r"Batch \[4\]\tSpeed: [\d.]+ samples/sec", lines.text)
    assert "Train-accuracy" not in lines.text


def test_num_examples_scales_any_run_down(tmp_path: Path, lines: pytest.LogCaptureFixture) -> None:
    fit(replace(OPTIONS, num_epochs=1, num_examples=16, model_prefix=str(tmp_path / "few")))
    assert "--batch-size 128 is more than a worker's share of an epoch: using 16" in lines.text
    assert load(path_for(tmp_path / "few", 0, 1)).metadata["options"]["batch_size"] == 16


def test_synthetic_data_needs_no_file(lines: pytest.LogCaptureFixture) -> None:
    options = replace(OPTIONS, benchmark=True, image_shape=(3, 28, 28), num_classes=10, num_examples=64, batch_size=8)
    assert fit(replace(options, network="lenet", num_epochs=1)) == 0
    assert "Train-accuracy" in lines.text
    assert "Validation" not in lines.text


def test_tensorboard_gets_the_curves(tmp_path: Path) -> None:
    fit(replace(OPTIONS, num_epochs=1, tensorboard=str(tmp_path / "board")))
    assert list((tmp_path / "board").glob("events.out.tfevents.*"))


def test_the_moving_average_is_validated_saved_and_resumed(tmp_path: Path) -> None:
    options = replace(OPTIONS, num_epochs=2, ema_epochs=1.0)
    fit(replace(options, model_prefix=str(tmp_path / "whole")))
    fit(replace(options, model_prefix=str(tmp_path / "part"), num_epochs=1))
    fit(replace(options, model_prefix=str(tmp_path / "part"), resume=True))
    whole, part = (load(path_for(tmp_path / name, 0, 2)) for name in ("whole", "part"))
    assert same(whole.weights, part.weights), "training does not see the average"
    kept = {name for name in whole.extra if name.startswith("average.")}
    assert kept
    assert same({name: whole.extra[name] for name in kept}, {name: part.extra[name] for name in kept})
    plain = tmp_path / "plain"
    fit(replace(options, ema_epochs=0.0, model_prefix=str(plain)))
    assert same(weights(plain, 2), whole.weights | whole.optimizer)
