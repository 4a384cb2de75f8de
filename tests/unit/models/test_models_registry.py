"""Names, depths, sizes and options of networks: which are accepted, and the errors for the others."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from echelon import models
from echelon.errors import UsageError


def _meta(network: str, size: int = 28, channels: int = 3, **options: Any) -> nn.Module:
    with torch.device("meta"):
        return models.build(network, num_classes=10, image_shape=(channels, size, size), **options)


def test_importing_the_registry_does_not_import_torch() -> None:
    code = "import sys, echelon.models as m; m.names(); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_name_lists_the_names_and_suggests_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'inception-v3'") as caught:
        _meta("Inception_V3")
    assert all(name in str(caught.value) for name in models.names())
    assert "package.module:function" in str(caught.value)


@pytest.mark.parametrize("depth", [8, 14, 20, 50, 110, 158, 164, 173])
def test_small_images_have_depths_6n_and_9n_plus_2(depth: int) -> None:
    model = _meta("resnet", num_layers=depth)
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len(layers) == depth + 3  # plus three projections


@pytest.mark.parametrize(
    ("network", "size", "depth", "message"),
    [
        ("resnet", 28, 21, r"resnet does not exist with 21 layers .* height 28; .*6n\+2.*9n\+2.*over 28 .* 18, 34, 50"),
        ("resnet", 28, 2, "not exist with 2 layers"),
        ("resnet", 28, -4, "not exist with -4 layers"),
        ("resnet", 28, 170, "not exist with 170 layers"),
        (
            "resnet",
            32,
            110,
            r"not exist with 110 layers .* height 32; .*18, 34, 50, 101, 152, 200, 269\. .*up to 28 .*6n\+2",
        ),
        ("resnet-v1", 224, 51, "resnet-v1 does not exist with 51 layers"),
        ("resnext", 32, 50, None),  # 32 is small for resnext: 8 units per stage
        ("resnext", 33, 110, "up to 32 use another layout"),
        ("vgg", 224, 50, "not exist with 50 layers; choose from 11, 13, 16, 19.*--num-layers"),
    ],
)
def test_an_unsupported_depth_lists_the_supported_ones(
    network: str, size: int, depth: int, message: str | None
) -> None:
    if message is None:
        _meta(network, size, num_layers=depth)
        return
    with pytest.raises(UsageError, match=message):
        _meta(network, size, num_layers=depth)


def test_the_default_depth_is_that_of_the_scripts() -> None:
    assert len(_meta("resnet").state_dict()) == len(_meta("resnet", num_layers=110).state_dict())
    assert len(_meta("resnet", 224).state_dict()) == len(_meta("resnet", 224, num_layers=50).state_dict())


def test_networks_without_a_choice_of_depth_ignore_it() -> None:
    _meta("alexnet", 224, num_layers=50)  # train_imagenet passes its default to every network


@pytest.mark.parametrize(
    ("network", "given", "channels"),
    [
        ("lenet", 9, 1),
        ("digits-cnn", 3, 1),
        ("alexnet", 32, 3),
        ("vgg", 28, 3),
        ("googlenet", 28, 3),
        ("inception-bn", 32, 3),
        ("inception-bn-full", 28, 3),
        ("inception-bn-28-small", 8, 3),
        ("inception-v3", 224, 3),
        ("inception-v4", 224, 3),
        ("inception-resnet-v2", 32, 3),
        ("mobilenet", 28, 3),
    ],
)
def test_too_small_an_image_names_the_smallest_that_fits(network: str, given: int, channels: int) -> None:
    with pytest.raises(UsageError, match=f"{channels},{given},{given} is too small") as caught:
        _meta(network, given, channels)
    smallest = int(re.findall(r"at least (\d+)x", str(caught.value))[0])
    _meta(network, smallest, channels)
    with pytest.raises(UsageError, match="too small"):
        _meta(network, smallest - 1, channels)


def test_inception_bn_explains_why_32x32_is_too_small() -> None:
    with pytest.raises(UsageError, match=r"Above a height of 28 .* inception-bn-28-small"):
        _meta("inception-bn", 32)
    _meta("inception-bn-28-small", 32)


@pytest.mark.parametrize("shape", [(28, 28), (3, 0, 28), (3, 28, 28, 1)])
def test_bad_image_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="channels,height,width"):
        models.build("mlp", num_classes=10, image_shape=shape)  # type: ignore[arg-type]


def test_zero_classes_are_rejected() -> None:
    with pytest.raises(UsageError, match="not 0"):
        models.build("mlp", num_classes=0, image_shape=(1, 28, 28))


def test_an_option_that_a_network_does_not_accept_is_rejected() -> None:
    with pytest.raises(UsageError, match="'mlp' does not accept add_stn; its options: none"):
        _meta("mlp", add_stn=True)
    with pytest.raises(UsageError, match="its options: add_stn"):
        _meta("lenet", num_group=2)
    _meta("mlp", add_stn=None)


def test_groups_must_divide_the_channels() -> None:
    with pytest.raises(UsageError, match="128 channels into num_group=7"):
        _meta("resnext", 224, num_group=7)


@pytest.mark.parametrize(("network", "option"), [("mobilenet", "alpha"), ("mobilenetv2", "multiplier")])
def test_width_of_mobilenets(network: str, option: str) -> None:
    def num_parameters(width: Any) -> int:
        return sum(p.numel() for p in _meta(network, 224, **{option: width}).parameters())

    assert num_parameters(0.5) < num_parameters(1.0)
    with pytest.raises(UsageError, match="above 0"):
        num_parameters(0.0)


USERS = """
from torch import nn
answer = 42
def plain(num_classes): return nn.Linear(4, num_classes)
def deep(num_classes, num_layers=3, *, width=8): return nn.Sequential(*[nn.Linear(width, num_classes)] * num_layers)
def everything(**options): return nn.Linear(len(options), 1)
def demanding(num_classes, vocabulary): return nn.Linear(1, 1)
def no_module(): return "a network"
def positional(image_shape=None, num_classes=2, width=3, /, **rest): return nn.Linear(width, num_classes)
def lazy(num_classes): return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))
class Net(nn.Linear):
    def __init__(self, num_classes): super().__init__(4, num_classes)
net = Net(10)
"""

BROKEN = {
    "missing": "import os\n\nimport no_such_module_anywhere\n",
    "misnamed": "from os import no_such_name\n",
    "misspelt": "import os\ndef f(:\n    pass\n",
    "wrong": "import os\n\ndef share(x): return 1 / x\nhalf = share(0)\n",
    "indirect": "import os\nimport broken.wrong\n",
}


@pytest.fixture
def _users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_networks.py").write_text(USERS)
    (tmp_path / "broken").mkdir()
    for name, text in BROKEN.items():
        (tmp_path / "broken" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("_users")
def test_a_users_function_gets_the_arguments_it_accepts() -> None:
    assert _meta("users_networks:plain", num_layers=5).out_features == 10
    assert len(_meta("users_networks:deep")) == 3  # type: ignore[arg-type]
    assert len(_meta("users_networks:deep", num_layers=5, width=2)) == 5  # type: ignore[arg-type]
    assert _meta("users_networks:everything", depth=1).in_features == 3
    assert _meta("users_networks:Net").out_features == 10
    assert [
        _meta("users_networks:positional").out_features,
        _meta("users_networks:positional", width=5).in_features,
    ] == [
        10,
        5,
    ]


@pytest.mark.usefixtures("_users")
@pytest.mark.parametrize(
    ("network", "options", "message"),
    [
        ("users_networks:plan", {}, r"did you mean 'plain'\?"),
        ("users_networks:answer", {}, "is a int, not a function"),
        ("users_networks:demanding", {}, "needs vocabulary, but is only given num_classes"),
        ("users_networks:no_module", {}, r"returned a str, not a torch.nn.Module"),
        ("users_networks:deep", {"colour": 1}, "does not accept colour; its options: width"),
        ("users_networkz:plain", {}, "cannot import 'users_networkz'.*PYTHONPATH"),
        ("broken.missed:f", {}, "cannot import 'broken.missed'.*PYTHONPATH"),
        ("users_networks.deep:f", {}, "cannot import 'users_networks.deep'.*PYTHONPATH"),
        ("users_networks:net", {}, r"'net' is already a network \(a Net\); name a function or class that makes one"),
        ("users_networks:lazy", {}, r"parameters without a size \(1.weight, 1.bias\).*nn.Linear instead of"),
        ("users_networks:", {}, "unknown network"),
        ("./users_networks.py:plain", {}, "unknown network"),
    ],
)
def test_an_unusable_users_function_is_rejected(network: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _meta(network, **options)


@pytest.mark.usefixtures("_users")
@pytest.mark.parametrize(
    ("module", "line", "error"),
    [
        ("missing", "line 3", "ModuleNotFoundError: No module named 'no_such_module_anywhere'"),
        ("misnamed", "line 1", "ImportError: cannot import name 'no_such_name' from 'os'"),
        ("misspelt", "line 2", "SyntaxError: invalid syntax"),
        ("wrong", "line 3", "ZeroDivisionError: division by zero"),
        ("indirect", "line 2", "ZeroDivisionError: division by zero"),
    ],
)
def test_an_import_error_names_the_users_file_and_line(tmp_path: Path, module: str, line: str, error: str) -> None:
    with pytest.raises(UsageError) as caught:
        _meta(f"broken.{module}:f")
    message = str(caught.value)
    assert message.startswith(f"Network 'broken.{module}:f': importing 'broken.{module}' failed: {error}")
    assert f"{tmp_path / 'broken' / module}.py, {line}" in message
    assert ("wrong.py, line 3" in message) == (module in ("wrong", "indirect"))
    assert "importlib" not in message


@pytest.mark.usefixtures("_users")
def test_a_users_network_keeps_its_weights_unless_an_initializer_is_named() -> None:
    def is_all_ones(initializer: str) -> bool:
        model = models.build("users_networks:plain", num_classes=2, image_shape=(1, 2, 2), initializer=initializer)
        return bool(model.get_parameter("weight").eq(1.0).all())

    assert not is_all_ones("default")
    assert is_all_ones("one")
