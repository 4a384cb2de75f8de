"""MXNet's .params files as users give them: to `echelon convert`, `echelon score`, `Predictor` and --load-epoch."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from echelon import models
from echelon.cli.main import main
from echelon.data.records.class_file import read_class_names, write_class_names
from echelon.errors import DataError
from echelon.train.checkpoint.format import Checkpoint, load, save
from echelon.train.checkpoint.mxnet import model as mxnet
from echelon.train.checkpoint.mxnet import params
from echelon.train.checkpoint.names import load_model, path_for
from echelon.train.loop.fit import fit
from echelon.train.predict import Predictor
from echelon.train.recipe.options import TrainOptions

pytestmark = pytest.mark.numeric

SHAPE = (1, 8, 8)  # of the digits
RUN = TrainOptions(network="mlp", batch_size=128, num_epochs=2, lr=0.05, seed=7)


def build(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return models.build("mlp", num_classes=10, image_shape=SHAPE)


def write(path: Path, model: nn.Module) -> Path:
    params.save(path, mxnet.arrays_of("mlp", model))
    return path


def run(*words: str | Path) -> int:
    return main(list(map(str, words)))


def test_convert_to_a_checkpoint_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = write(tmp_path / "x-0012.params", build()), tmp_path / "y-0012.safetensors"
    assert run("convert", source, target, "--rgb-mean", "7", "--rgb-std", "9") == 0
    assert capsys.readouterr().out == f"Saved {target}\n"
    found = load(target)
    assert found.metadata["options"]["rgb_mean"] == [7]
    assert {name: found.metadata[name] for name in ("network", "num_classes", "image_shape", "epoch")} == {
        "network": "mlp",
        "num_classes": 10,
        "image_shape": [1, 8, 8],
        "epoch": 12,
    }
    assert run("convert", target, tmp_path / "z.params") == 0
    assert (tmp_path / "z.params").read_bytes() == source.read_bytes()
    assert not (tmp_path / "z.classes").exists()


def test_class_names_are_beside_a_params_file(tmp_path: Path) -> None:
    source, names = write(tmp_path / "x-0012.params", build()), tuple("abcdefghij")
    write_class_names(source, names)
    assert run("convert", source, tmp_path / "y.safetensors") == 0
    assert Predictor.load(tmp_path / "y.safetensors").classes == Predictor.load(source).classes == names
    assert run("convert", tmp_path / "y.safetensors", tmp_path / "z.params") == 0
    assert read_class_names(tmp_path / "z.params") == names


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["x.params", "y.onnx"], "OUT is .*y.onnx; give a file name that ends with .safetensors or .params"),
        (["x.params", "y.params"], "have the same format; give a file name that ends with .safetensors"),
        (["x.safetensors", "y.safetensors"], "have the same format; give a file name that ends with .params"),
        (["x.safetensors", "y.params", "--num-layers", "8"], "--num-layers: .*x.safetensors says what its network is"),
        (
            ["x.params", "y.safetensors", "--network", "lenet"],
            "they have no matrix 'convolution0_weight'; check --net",
        ),
        (["x.params", "y.safetensors", "--network", "lent"], "unknown network 'lent'; did you mean 'lenet'"),
        (["x.params", "y.safetensors", "--num-classes", "11"], r"fc3_weight is \(10, 64\) in the file, \(11, 64\) in"),
        (["x.params", "y.safetensors", "--num-classes", "0"], "--num-classes must be 1 or more, not 0"),
        (["w.params", "y.safetensors"], "there is no file .*w.params"),
    ],
)
def test_wrong_conversions_are_rejected(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mxnet_file = write(tmp_path / "x.params", build())
    save(tmp_path / "x.safetensors", mxnet.load(mxnet_file))
    source, target, *flags = words
    assert run("convert", tmp_path / source, tmp_path / target, *flags) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not list(tmp_path.glob("y*"))


def test_the_score_of_a_params_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By file, by prefix and epoch, and by prefix: the newest epoch, unless there are checkpoints of Echelon."""
    for epoch in (9, 10):
        write(tmp_path / f"x-{epoch:04d}.params", build(epoch))
    flags = ["--data", "digits", "--top-k", "0", "--rgb-mean", "4.8", "--rgb-std", "8"]
    scores = []
    for model in ([tmp_path / "x-0009.params"], [tmp_path / "x", "--load-epoch", "9"], [tmp_path / "x"]):
        assert run("score", "--model", *model, *flags) == 0
        scores.append(capsys.readouterr().out.splitlines()[1])
    assert scores[0] == scores[1] != scores[2]
    assert load_model(tmp_path / "x")[1] == tmp_path / "x-0010.params"
    save(path_for(tmp_path / "x", 0, 1), Checkpoint({}, metadata={}))
    assert load_model(tmp_path / "x")[1] == tmp_path / "x-0001.safetensors"
    assert load_model(tmp_path / "x", 9)[1] == tmp_path / "x-0009.params"


def test_a_predictor_says_how_it_read_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model = build()
    path = write(tmp_path / "x-0001.params", model)
    predict = Predictor.load(path)
    assert predict.preprocessing.rgb_std == (255.0,)
    assert f"{path} holds MXNet's mlp for 10 classes and images of 1,8,8" in caplog.text
    images = torch.rand(3, *SHAPE)
    with torch.no_grad():
        best = model.eval()(images).argmax(1).tolist()
    assert [ranking[0][0] for ranking in predict(images)] == best


@pytest.mark.parametrize("style", ["torch", "mxnet"])
def test_training_continues_from_a_params_file(style: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An epoch from MXNet's weights, with an empty optimizer state, is that of a checkpoint with these weights."""
    caplog.set_level(logging.INFO)
    prefix = tmp_path / "x"
    path = write(tmp_path / "x-0001.params", build())
    options = replace(RUN, optimizer_style=style, load_epoch=1)
    assert fit(replace(options, model_prefix=str(prefix))) == 0
    assert f"Loaded model {path}" in caplog.text
    assert f"{path} holds only weights, as MXNet saves them: the state of the optimizer starts from zero" in caplog.text
    assert "Epoch[1] Train-accuracy" in caplog.text
    assert "Epoch[0] Train-accuracy" not in caplog.text
    assert run("convert", path, tmp_path / "y-0001.safetensors") == 0
    assert fit(replace(options, model_prefix=str(tmp_path / "y"))) == 0
    found, expected = (load(path_for(tmp_path / name, 0, 2)).weights for name in ("x", "y"))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not torch.equal(found["classifier.fc.bias"], build().get_parameter("classifier.fc.bias"))


def test_a_params_file_of_another_network_is_rejected(tmp_path: Path) -> None:
    write(tmp_path / "x-0001.params", build())
    options = replace(RUN, network="digits-cnn", model_prefix=str(tmp_path / "x"), load_epoch=1)
    with pytest.raises(Exception, match=r"x-0001\.params .*have no network like 'digits-cnn'"):
        fit(options)
    torch.manual_seed(1)
    other = models.build("mlp", num_classes=11, image_shape=SHAPE)
    write(tmp_path / "x-0001.params", other)
    with pytest.raises(DataError, match=r"fc3_weight is \(11, 64\) in the file, \(10, 64\) in the network"):
        fit(replace(RUN, model_prefix=str(tmp_path / "x"), load_epoch=1))
