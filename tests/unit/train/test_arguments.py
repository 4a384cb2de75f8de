"""The flags of the trainers: MXNet's short forms and defaults, and messages about wrong flags."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from echelon.data.images.config import AugmentConfig
from echelon.environment import Job
from echelon.errors import UsageError
from echelon.train.flags.arguments import options_from
from echelon.train.flags.check import check_flags
from echelon.train.flags.parser import Parser

EXAMPLES = Path(__file__).parents[3] / "examples" / "image-classification"

# The shortest forms that MXNet 1.9's train_imagenet.py and train_cifar10.py accept, and the flags they mean.
SHORT = {
    "ne": "network", "num-l": "num_layers", "gp": "gpus", "k": "kv_store", "num-ep": "num_epochs",
    "lr-f": "lr_factor", "lr-s": "lr_step_epochs", "in": "initializer", "o": "optimizer", "mom": "mom", "wd": "wd",
    "ba": "batch_size", "di": "disp_batches", "mod": "model_prefix", "sav": "save_period", "mon": "monitor",
    "loa": "load_epoch", "to": "top_k", "los": "loss", "te": "test_io", "dt": "dtype", "gc-ty": "gc_type",
    "gc-th": "gc_threshold", "mac": "macrobatch_size", "warmup-e": "warmup_epochs", "warmup-s": "warmup_strategy",
    "profile-w": "profile_worker_suffix", "profile-s": "profile_server_suffix",
    "u": "use_imagenet_data_augmentation", "data-train-": "data_train_idx", "data-val-": "data_val_idx",
    "rgb-m": "rgb_mean", "rgb-s": "rgb_std", "pa": "pad_size", "f": "fill_value", "im": "image_shape",
    "num-c": "num_classes", "num-ex": "num_examples", "data-n": "data_nthreads", "be": "benchmark",
    "random-c": "random_crop", "random-m": "random_mirror", "random-r": "random_resized_crop",
    "min-random-as": "min_random_aspect_ratio", "max-random-as": "max_random_aspect_ratio",
    "max-random-r": "max_random_rotate_angle", "max-random-sh": "max_random_shear_ratio",
    "max-random-sc": "max_random_scale", "min-random-s": "min_random_scale", "max-random-ar": "max_random_area",
    "min-random-ar": "min_random_area", "min-c": "min_crop_size", "max-c": "max_crop_size", "br": "brightness",
    "c": "contrast", "sat": "saturation", "pc": "pca_noise",
}  # fmt: skip
SHORT_MNIST = {"b": "batch_size", "s": "save_period", "ma": "macrobatch_size", "gpu": "gpus", "num-epoch": "num_epochs"}
AMBIGUOUS = ["num", "data", "rgb", "gc", "warmup", "random", "max-random"]


def script(name: str) -> Parser:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    parser = module.parser
    sys.modules.pop(name, None)
    assert isinstance(parser, Parser)
    return parser


IMAGENET, CIFAR, MNIST = script("train_imagenet"), script("train_cifar10"), script("train_mnist")


@pytest.mark.parametrize(("short", "meant"), SHORT.items())
@pytest.mark.parametrize("parser", [IMAGENET, CIFAR], ids=["imagenet", "cifar10"])
def test_mxnets_short_forms_have_their_meaning(parser: Parser, short: str, meant: str) -> None:
    given = vars(parser.parse_args([f"--{short}", "7"]))
    assert given[meant] in (7, 7.0, "7")


@pytest.mark.parametrize(("short", "meant"), SHORT_MNIST.items())
def test_train_mnist_has_short_forms_of_its_own(short: str, meant: str) -> None:
    assert vars(MNIST.parse_args([f"--{short}", "7"]))[meant] in (7, "7")


@pytest.mark.parametrize("short", AMBIGUOUS)
def test_ambiguous_short_forms_are_rejected(short: str) -> None:
    with pytest.raises(UsageError, match="ambiguous option"):
        IMAGENET.parse_args([f"--{short}", "7"])


def test_train_mnist_accepts_image_shape_only_with_an_underscore() -> None:
    options = options_from(MNIST.parse_args(["--image_shape", "1, 28, 28"]), "imagenet")
    assert options.image_shape == (1, 28, 28)
    with pytest.raises(UsageError, match=r"unknown flag --image-shape; did you mean --image_shape\?"):
        MNIST.parse_args(["--image-shape", "1,28,28"])


def test_the_defaults_of_the_scripts_are_mxnets() -> None:
    imagenet, cifar, mnist = (options_from(parser.parse_args([]), "imagenet") for parser in (IMAGENET, CIFAR, MNIST))
    assert (imagenet.network, imagenet.num_layers, imagenet.num_classes, imagenet.num_examples) == (
        "resnet", 50, 1000, 1281167,
    )  # fmt: skip
    assert (imagenet.batch_size, imagenet.num_epochs, imagenet.lr, imagenet.lr_step_epochs) == (128, 80, 0.1, "30,60")
    assert (cifar.network, cifar.num_layers, cifar.image_shape, cifar.augment["pad_size"]) == (
        "resnet", 110, (3, 28, 28), 4,
    )  # fmt: skip
    assert (cifar.batch_size, cifar.num_epochs, cifar.lr, cifar.lr_step_epochs) == (128, 300, 0.05, "200,250")
    assert (mnist.network, mnist.batch_size, mnist.num_epochs, mnist.disp_batches) == ("mlp", 64, 20, 100)
    for options in (imagenet, cifar, mnist):
        assert (options.kv_store, options.lr_factor, options.momentum, options.weight_decay) == (
            "device",
            0.1,
            0.9,
            1e-4,
        )
        assert (options.optimizer, options.initializer, options.top_k, options.devices) == (
            "sgd",
            "default",
            0,
            ("cpu",),
        )


def test_a_fourth_channel_may_have_a_mean() -> None:
    options = options_from(IMAGENET.parse_args(["--image-shape", "4,8,8", "--rgb-mean", "1,2,3,4"]), "imagenet")
    assert options.augment["rgb_mean"] == (1.0, 2.0, 3.0, 4.0)


def test_options_contain_only_the_augmentation_that_was_given() -> None:
    options = options_from(
        IMAGENET.parse_args(["--max-random-h", "36", "--random-mirror", "1", "--rgb-mean", "1,2,3"]), "imagenet"
    )
    assert options.augment == {
        "max_random_h": 36, "random_mirror": True, "rgb_mean": (1.0, 2.0, 3.0), "min_random_scale": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--image-shape 3,224", "--image-shape '3,224' is not a list of channels,height,width, for example 3,224,224"),
        ("--rgb-mean a,b", "--rgb-mean 'a,b' is not a list of numbers"),
        ("--rgb-mean 1,2,3,4,5", "--rgb-mean '1,2,3,4,5' has 5 numbers: give one per channel, at most 3"),
        ("--rgb-std 1,1,1,1 --image-shape 1,8,8", "--rgb-std '1,1,1,1' has 4 numbers: give one per channel, at most 3"),
        (
            "--rgb-std 1,1,1,1,1 --image-shape 4,8,8",
            "--rgb-std '1,1,1,1,1' has 5 numbers: give one per channel, at most 4",
        ),
        ("--batch-size 0", "--batch-size must be 1 or more, not 0"),
        ("--dtype int8", "--dtype 'int8': use one of auto, float32, float16, bfloat16"),
        ("--engine warp", "--engine 'warp': use one of auto, eager, compile, graph"),
        ("--gc-type 2bit", "--gc-type 2bit: gradient compression is not implemented yet"),
        ("--nosuch 1", "unknown flag --nosuch"),
        ("--lr x", "argument --lr: invalid float value: 'x'"),
    ],
)
def test_wrong_flags_are_rejected_with_a_message(arguments: str, message: str) -> None:
    def check() -> None:
        given = IMAGENET.parse_args(arguments.split())
        check_flags(given, options_from(given, "imagenet"), Job())

    with pytest.raises(UsageError) as caught:
        check()
    assert message in str(caught.value)


IMAGENET_VALUES = {
    "rgb_mean": (123.68, 116.779, 103.939), "rgb_std": (58.393, 57.12, 57.375), "random_crop": False,
    "random_resized_crop": True, "random_mirror": True, "min_random_area": 0.08, "min_random_aspect_ratio": 3 / 4,
    "max_random_aspect_ratio": 4 / 3, "brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "pca_noise": 0.1,
}  # fmt: skip


@pytest.mark.parametrize("parser", [IMAGENET, CIFAR], ids=["imagenet", "cifar10"])
def test_imagenet_augmentation_replaces_defaults_but_not_given_flags(parser: Parser) -> None:
    """The values are those of MXNet 1.9's train_imagenet.py. train_cifar10.py crops at random by default."""
    before = options_from(parser.parse_args([]), "imagenet").augment
    words = ["--use-imagenet-data-augmentation", "1"]
    assert options_from(parser.parse_args(words), "imagenet").augment == before | IMAGENET_VALUES
    given = options_from(parser.parse_args([*words, "--brightness", "0.1", "--rgb-std", "1,1,1"]), "imagenet").augment
    assert given == before | IMAGENET_VALUES | {"brightness": 0.1, "rgb_std": (1, 1, 1)}
    AugmentConfig(**given)  # raises for values that exclude each other
    assert options_from(parser.parse_args([*words[:1], "0"]), "imagenet").augment == before


def test_imagenet_augmentation_and_profiles_do_not_stop_a_script() -> None:
    words = [
        "--use-imagenet-data-augmentation",
        "1",
        "--profile-worker-suffix",
        "w.json",
        "--profile-server-s",
        "s.json",
    ]
    for parser, data in ((IMAGENET, "imagenet"), (MNIST, "mnist")):
        given = parser.parse_args(words)
        check_flags(given, options_from(given, data), Job())
