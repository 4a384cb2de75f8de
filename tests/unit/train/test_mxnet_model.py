"""Checkpoints from MXNet's .params files: the right network with all weights, or an error that says what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon import models
from echelon.errors import DataError, UsageError
from echelon.train.checkpoint.mxnet import model as mxnet
from echelon.train.checkpoint.mxnet import params
from echelon.train.checkpoint.mxnet.recognise import Network, Wanted
from mxnet_graphs import named_graph, symbol_nodes, symbol_text

Arrays = dict[str, Tensor]


def build(network: str, shape: tuple[int, int, int], num_layers: int | None = None, **options: Any) -> nn.Module:
    """Build a network with random weights, scales and statistics."""
    generator = torch.Generator().manual_seed(1)
    model = models.build(network, num_classes=10, image_shape=shape, num_layers=num_layers, **options)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            lowest = 0.5 if name.endswith("running_var") else -0.5
            tensor.uniform_(lowest, lowest + 1, generator=generator)
    return model


def write(path: Path, network: str, model: nn.Module, change: Callable[[Arrays], object] = lambda _: None) -> Path:
    arrays = mxnet.arrays_of(network, model)
    change(arrays)
    params.save(path, arrays)
    return path


def write_symbol(prefix: str | Path, network: str, model: nn.Module) -> None:
    Path(f"{prefix}-symbol.json").write_bytes(symbol_text(symbol_nodes(named_graph(network, model))))


CASES: list[tuple[str, tuple[int, int, int], int | None, dict[str, Any]]] = [
    ("mlp", (1, 28, 28), None, {}),
    ("mlp", (3, 32, 32), None, {}),
    ("lenet", (1, 28, 28), None, {}),
    ("lenet", (1, 28, 28), None, {"add_stn": True}),
    ("inception-bn", (3, 28, 28), None, {}),
    ("mobilenet", (3, 224, 224), None, {"alpha": 0.25}),
    ("mobilenetv2", (3, 224, 224), None, {"multiplier": 0.5}),
    ("resnet", (3, 28, 28), 8, {}),
    ("resnet", (1, 32, 32), 18, {}),
    ("resnet", (3, 224, 224), 18, {}),
    ("resnet-v1", (3, 28, 28), 14, {}),
    ("resnext", (3, 28, 28), 164, {"num_group": 16}),
    ("resnet-28-small", (3, 28, 28), None, {}),
]


@pytest.mark.parametrize("with_symbol", [False, True], ids=["names", "symbol"])
@pytest.mark.parametrize(("network", "shape", "depth", "options"), CASES)
def test_the_network_is_recognised_and_its_weights_are_read(
    network: str,
    shape: tuple[int, int, int],
    depth: int | None,
    options: dict[str, Any],
    with_symbol: bool,
    tmp_path: Path,
) -> None:
    model = build(network, shape, depth, **options)
    path = write(tmp_path / "x-0012.params", network, model)
    if with_symbol:
        write_symbol(tmp_path / "x", network, model)
    found = mxnet.load(path)
    expected = {"network": network, "num_layers": depth, "image_shape": list(shape), "num_classes": 10, "epoch": 12}
    assert {name: found.metadata[name] for name in expected} == expected
    assert found.metadata["network_options"] == options
    fixed = {f"{path}.weight" for path, module in model.named_modules() if is_fixed(module)}
    assert found.weights.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(found.weights[name], torch.ones_like(tensor) if name in fixed else tensor), name


def is_fixed(module: nn.Module) -> bool:
    return isinstance(module, nn.BatchNorm2d) and not module.weight.requires_grad


def test_numbers_of_another_network_in_the_same_process(tmp_path: Path) -> None:
    model = build("lenet", (1, 28, 28))
    names = {"convolution0": "convolution7", "convolution1": "convolution8", "fullyconnected1": "fullyconnected3"}
    names["fullyconnected0"] = "fullyconnected2"

    def renumber(arrays: Arrays) -> None:
        for name in list(arrays):
            kind, _, rest = name.removeprefix("arg:").partition("_")
            arrays[f"arg:{names[kind]}_{rest}"] = arrays.pop(name)

    found = mxnet.load(write(tmp_path / "x-0001.params", "lenet", model, renumber))
    assert all(torch.equal(found.weights[name], tensor) for name, tensor in model.state_dict().items())


def test_half_precision_becomes_float32(tmp_path: Path) -> None:
    model = build("mlp", (1, 28, 28)).half()
    found = mxnet.load(write(tmp_path / "x-0001.params", "mlp", model))
    for name, tensor in model.state_dict().items():
        assert found.weights[name].dtype == torch.float32
        assert torch.equal(found.weights[name], tensor.float())


def test_loading_draws_no_random_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "x-0001.params", "resnet", build("resnet", (3, 28, 28), 8))
    before = torch.get_rng_state()
    mxnet.load(path)
    assert torch.equal(torch.get_rng_state(), before)


def test_names_without_prefixes(tmp_path: Path) -> None:
    model = build("mlp", (1, 28, 28))
    arrays = mxnet.arrays_of("mlp", model)
    plain = {name.removeprefix("arg:"): array for name, array in arrays.items()}
    params.save(tmp_path / "x.params", plain)
    assert torch.equal(mxnet.load(tmp_path / "x.params").weights["classifier.fc.bias"], arrays["arg:fc3_bias"])
    params.save(tmp_path / "x.params", plain | arrays)
    with pytest.raises(DataError, match=r"x\.params has arrays whose names differ only by arg: and aux:"):
        mxnet.load(tmp_path / "x.params")


def test_a_users_own_network_is_rejected(tmp_path: Path) -> None:
    path = write(tmp_path / "x-0001.params", "mlp", build("mlp", (1, 28, 28)))
    with pytest.raises(UsageError, match=r"are read only for Echelon's networks, not for 'my\.module:net'"):
        mxnet.load(path, Network("my.module:net", 10, (1, 28, 28), None, {}))


def drop(name: str) -> Callable[[Arrays], object]:
    return lambda arrays: arrays.pop(name)


def put(name: str, tensor: Tensor) -> Callable[[Arrays], object]:
    return lambda arrays: arrays.update({name: tensor})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            drop("arg:fc2_bias"),
            r"x-0001\.params \(there is no x-symbol\.json\): .* missing in the file: fc2_bias \(64,\)\.",
        ),
        (put("arg:fc4_bias", torch.ones(3)), r"only in the file: fc4_bias \(3,\)\."),
        (
            put("arg:fc2_weight", torch.ones(64, 127)),
            r"of another shape: fc2_weight is \(64, 127\) in the file, \(64, 128\) in the network\.",
        ),
        (put("arg:fc2_bias", torch.ones(64, dtype=torch.int32)), r"'fc2_bias' is torch\.int32; weights are floating"),
        (put("arg:fc1_weight", torch.ones(128, 131)), "--image-shape of the network 'mlp' cannot be recognised"),
        (put("arg:fc3_weight", torch.ones(9)), "--num-classes of the network 'mlp' cannot be recognised"),
        (drop("arg:fc3_weight"), r"cannot be recognised by the names of the arrays \(fc1_bias, fc1_weight, "),
    ],
)
def test_a_partial_match_is_an_error(change: Callable[[Arrays], object], message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "x-0001.params", "mlp", build("mlp", (1, 28, 28)), change)
    with pytest.raises((DataError, UsageError), match=message):
        mxnet.load(path)


def test_many_differences_are_shortened(tmp_path: Path) -> None:
    path = write(tmp_path / "x-0001.params", "resnet", build("resnet", (3, 28, 28), 14))
    with pytest.raises(
        DataError, match=r"missing in the file: [^;]* and \d+ more; only in the file: [^;]* and \d+ more"
    ):
        mxnet.load(path, Wanted(network="resnet-v1"))
    with pytest.raises(
        DataError, match=r"only in the file: stage\d_unit2_[^;]* and \d+ more\. Check --network, --num-"
    ):
        mxnet.load(path, Wanted(num_layers=8))


def test_what_the_caller_says_has_precedence(tmp_path: Path) -> None:
    model = build("lenet", (1, 32, 32))
    path = write(tmp_path / "x-0003.params", "lenet", model)
    with pytest.raises(
        DataError, match=r"fullyconnected0_weight is \(500, 1250\) in the file, \(500, 800\) in the net"
    ):
        mxnet.load(path)
    found = mxnet.load(path, Wanted(image_shape=(1, 32, 32)))
    assert torch.equal(found.weights["classifier.fc1.weight"], model.get_parameter("classifier.fc1.weight"))
    assert mxnet.load(path, Network("lenet", 10, (1, 32, 32), 50, {})).metadata["num_layers"] == 50


def test_a_user_named_network_is_paired_by_its_symbol_file(tmp_path: Path) -> None:
    """The names of the arrays say nothing; the symbol file pairs them."""
    model = build("resnet", (3, 28, 28), 8)
    nodes = symbol_nodes(named_graph("resnet", model))
    names = {node["name"]: f"v{number}" for number, node in enumerate(nodes) if node["op"] == "null"}
    for node in nodes:
        node["name"] = names.get(node["name"], node["name"])
    arrays = mxnet.arrays_of("resnet", model)
    params.save(tmp_path / "x-0001.params", {f"arg:{names[name[4:]]}": array for name, array in arrays.items()})
    (tmp_path / "x-symbol.json").write_bytes(symbol_text(nodes))
    with pytest.raises(
        UsageError, match=r"\(with x-symbol\.json\): the network cannot be recognised .*; give --network"
    ):
        mxnet.load(tmp_path / "x-0001.params")
    wanted = Wanted(network="resnet", num_layers=8, image_shape=(3, 28, 28))
    found = mxnet.load(tmp_path / "x-0001.params", wanted)
    assert found.metadata["num_classes"] == 10
    for name in ("features.stages.stage2.unit1.shortcut.weight", "features.norm1.bn.running_var"):
        assert torch.equal(found.weights[name], model.state_dict()[name])


def test_a_symbol_file_of_another_network_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "x-0001.params", "resnet", build("resnet", (3, 28, 28), 8))
    write_symbol(tmp_path / "x", "resnet", build("resnet", (3, 28, 28), 14))
    with pytest.raises(DataError, match=r"x-0001\.params \(with x-symbol\.json\): the .* is where the network has"):
        mxnet.load(path)


def test_the_sentence_that_describes_a_file(tmp_path: Path) -> None:
    path = write(tmp_path / "x-0001.params", "resnet", build("resnet", (3, 28, 28), 8))
    assert mxnet.describe(mxnet.load(path), path) == (
        f"{path} holds MXNet's resnet with 8 layers for 10 classes and images of 3,28,28 (layers are paired by the "
        "names of MXNet's script, because there is no x-symbol.json); unless you say otherwise, images are normalised "
        "as in MXNet's scripts, with mean 123.68,116.779,103.939 and std 1,1,1"
    )
    grey = write(tmp_path / "y.params", "lenet", build("lenet", (1, 28, 28)))
    write_symbol(tmp_path / "y", "lenet", build("lenet", (1, 28, 28)))
    sentence = mxnet.describe(mxnet.load(grey), grey)
    assert "lenet for 10 classes and images of 1,28,28 (layers are paired by y-symbol.json); " in sentence
    assert sentence.endswith("with mean 0 and std 255")
