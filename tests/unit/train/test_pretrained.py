"""Fine-tuning: the network comes from the checkpoint, and every weight except those of the last layer is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from echelon import models
from echelon.errors import UsageError
from echelon.train import script
from echelon.train.checkpoint.format import Checkpoint, save
from echelon.train.checkpoint.mxnet import model as mxnet
from echelon.train.checkpoint.mxnet import params
from echelon.train.checkpoint.names import path_for
from echelon.train.flags.arguments import options_from
from echelon.train.flags.check import warnings_about
from echelon.train.pretrained import copy_weights, last_layer, load_pretrained, options_for_pretrained
from echelon.train.recipe.options import TrainOptions

SHAPE = (1, 12, 12)
PARSER = script.make_parser(None)
PARSER.add_argument("--pretrained-model")
PARSER.add_argument("--layer-before-fullc", default="flatten0")
PARSER.set_defaults(network=None, image_shape="3,224,224", random_mirror=1)


def write_model(path: Path, num_classes: int = 10) -> Path:
    torch.manual_seed(1)
    model = models.build("mlp", num_classes=num_classes, image_shape=SHAPE)
    options = {"rgb_mean": (7.0,), "rgb_std": (9.0,)}
    metadata = {"network": "mlp", "num_classes": num_classes, "image_shape": SHAPE, "options": options}
    save(path, Checkpoint(model.state_dict(), metadata=metadata))
    return path


def options_of(*words: str | Path) -> TrainOptions:
    given = PARSER.parse_args([*map(str, words)])
    return options_for_pretrained(options_from(given, "folder"), given)


def test_network_and_preprocessing_come_from_the_checkpoint(tmp_path: Path) -> None:
    path = write_model(tmp_path / "x-0001.safetensors")
    options = options_of("--pretrained-model", path)
    assert (options.network, options.image_shape) == ("mlp", SHAPE)
    assert options.augment == {"rgb_mean": (7.0,), "rgb_std": (9.0,), "random_mirror": True}
    given = options_of("--pretrained-model", path, "--image-shape", "1,16,16", "--rgb-std", "2", "--network", "mlp")
    assert (given.image_shape, given.augment["rgb_std"]) == ((1, 16, 16), (2.0,))


def test_load_epoch_chooses_the_pretrained_checkpoint(tmp_path: Path) -> None:
    write_model(path_for(tmp_path / "x", 0, 1), num_classes=3)
    write_model(path_for(tmp_path / "x", 0, 2), num_classes=4)
    options = options_of("--pretrained-model", tmp_path / "x", "--load-epoch", "1", "--model-prefix", tmp_path / "y")
    assert (options.load_epoch, options.pretrained_epoch) == (None, 1)


def test_contradictions_are_rejected(tmp_path: Path) -> None:
    path = write_model(tmp_path / "x-0001.safetensors")
    with pytest.raises(UsageError, match="--pretrained-model is missing"):
        options_of()
    with pytest.raises(UsageError, match=r"--network lenet, but .*x-0001\.safetensors has mlp; leave --network out"):
        options_of("--pretrained-model", path, "--network", "lenet")
    with pytest.raises(UsageError, match=r"--num-layers 18, but .* has None; leave --num-layers out"):
        options_of("--pretrained-model", path, "--num-layers", "18")


@pytest.mark.parametrize(
    ("network", "num_layers", "shape"),
    [
        ("lenet", None, (1, 28, 28)),
        ("inception-bn-28-small", None, (3, 28, 28)),
        ("resnet", 20, (3, 28, 28)),
        ("resnext", 20, (3, 32, 32)),
        ("mobilenet", None, (3, 224, 224)),
        ("mobilenetv2", None, (3, 224, 224)),
    ],
)
def test_the_last_layer_is_found_by_its_shape(
    network: str, num_layers: int | None, shape: tuple[int, int, int]
) -> None:
    state = torch.get_rng_state()
    names = last_layer(TrainOptions(network=network, num_layers=num_layers), 7, shape)
    assert torch.equal(torch.get_rng_state(), state)
    weights = models.build(network, num_classes=7, image_shape=shape, num_layers=num_layers).state_dict()
    *_, last = weights
    layer = last.rpartition(".")[0]
    assert names == {name for name in weights if name.rpartition(".")[0] == layer}


@pytest.mark.parametrize("num_classes", [3, 10])
def test_all_other_weights_are_kept(tmp_path: Path, num_classes: int) -> None:
    """The last layer is new even if it has as many classes as before."""
    path = write_model(tmp_path / "x-0001.safetensors", 10)
    old = models.build("mlp", num_classes=10, image_shape=SHAPE)
    torch.manual_seed(1)
    old = models.build("mlp", num_classes=10, image_shape=SHAPE)
    new = models.build("mlp", num_classes=num_classes, image_shape=SHAPE)
    before = {name: tensor.clone() for name, tensor in new.state_dict().items()}
    load_pretrained(new, options_of("--pretrained-model", path), num_classes, SHAPE)
    *others, weight, bias = old.state_dict()
    for name in others:
        assert torch.equal(new.state_dict()[name], old.state_dict()[name])
        assert not torch.equal(before[name], old.state_dict()[name]) or name.endswith("bias")
    for name in (weight, bias):
        assert torch.equal(new.state_dict()[name], before[name])


def test_a_model_of_mxnet_is_fine_tuned(tmp_path: Path) -> None:
    torch.manual_seed(2)
    old = models.build("mlp", num_classes=10, image_shape=(1, 28, 28))
    params.save(tmp_path / "x-0012.params", mxnet.arrays_of("mlp", old))
    options = options_of("--pretrained-model", tmp_path / "x", "--load-epoch", "12")
    assert (options.network, options.image_shape) == ("mlp", (1, 28, 28))
    assert options.augment["rgb_std"] == (255.0,)
    new = models.build("mlp", num_classes=3, image_shape=(1, 28, 28))
    load_pretrained(new, options, 3, (1, 28, 28))
    assert torch.equal(next(new.parameters()), next(old.parameters()))


def test_weights_of_other_shapes_are_rejected() -> None:
    model = models.build("mlp", num_classes=10, image_shape=(1, 28, 28))
    other = models.build("mlp", num_classes=10, image_shape=SHAPE)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UsageError, match=r"x does not fit .* is \(128, 144\) there, \(128, 784\) here; use the image"):
        copy_weights(model, other.state_dict(), except_for=set(), source="x")
    with pytest.raises(UsageError, match="is missing there"):
        copy_weights(model, {}, except_for=set(), source="x")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_mxnets_name_of_the_layer_has_no_effect() -> None:
    assert warnings_about(PARSER.parse_args([])) == []
    expected = "--layer-before-fullc flatten has no effect: the last layer is found by its shape"
    assert warnings_about(PARSER.parse_args(["--layer-before-fullc", "flatten"])) == [expected]
