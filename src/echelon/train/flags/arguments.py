"""The flags of the trainers: MXNet's names and defaults, Echelon's own flags, and the `TrainOptions` they become."""

from __future__ import annotations

import argparse
from typing import Any

from echelon.errors import UsageError
from echelon.launch.devices import parse_devices
from echelon.train.flags.parser import Add, Parser, was_given
from echelon.train.flags.stores import store_lines
from echelon.train.recipe.options import DTYPES, ENGINES, METRICS, OPTIMIZER_STYLES, OPTIMIZERS, TrainOptions
from echelon.train.recipe.pace import Pace, parse_slow, parse_stall

OTHER_NAMES = {  # what these flags are called in other programs
    "--epochs": "--num-epochs",
    "--learning-rate": "--lr",
    "--momentum": "--mom",
    "--weight-decay": "--wd",
    "--model": "--network",
    "--arch": "--network",
    "--output": "--model-prefix",
    "--checkpoint": "--model-prefix",
    "--workers": "--num-workers",
    "--servers": "--num-servers",
    "--store": "--kv-store",
    "--dataset": "--data",
    "--log-interval": "--disp-batches",
    "--num-gpus": "--gpus",
}


def add_arguments(parser: Parser, *, images: bool = True) -> None:
    """Add the flags of training and, with `images`, those of data and augmentation."""
    parser.other_names = OTHER_NAMES
    _add_mxnet_arguments(parser.groups("training, as in MXNet's scripts")[0], TrainOptions())
    _add_own_arguments(parser.groups("training, Echelon's own flags")[1], TrainOptions())
    if images:
        _add_data_arguments(*parser.groups("data"))
        _add_augment_arguments(*parser.groups("augmentation"))
    parser.add_argument_group("stores (--kv-store)", description="\n".join(store_lines()))


def _add_mxnet_arguments(add: Add, defaults: TrainOptions) -> None:
    add("--network", default=defaults.network, help="name of a network, or package.module:function")
    add("--num-layers", type=int, unset="the network's", help="depth of resnet, resnext and vgg")
    add("--gpus", unset="the CPU", help="GPU numbers, for example 0,2,5; 0,0: two devices share a GPU")
    add(
        "--kv-store",
        default=defaults.kv_store,
        help="how workers and devices synchronize: see below (default: %(default)s; for several workers dist_sync)",
    )
    add("--num-epochs", type=int, default=defaults.num_epochs, help="number of epochs")
    add("--lr", type=float, default=defaults.lr, help="learning rate")
    add("--lr-factor", type=float, default=defaults.lr_factor, help="multiply the learning rate by this at every step")
    add(
        "--lr-step-epochs",
        default=defaults.lr_step_epochs,
        help="epochs of the steps, for example 30,60; or pow2",
    )
    add(
        "--initializer",
        default=defaults.initializer,
        help="default, xavier, msra, orthogonal, normal, uniform, …",
    )
    add("--optimizer", default=defaults.optimizer, help=f"one of {', '.join(OPTIMIZERS)}")
    add("--mom", type=float, default=defaults.momentum, help="momentum")
    add("--wd", type=float, default=defaults.weight_decay, help="weight decay")
    add(
        "--batch-size",
        type=int,
        default=defaults.batch_size,
        help="samples per step of each worker, over all its devices",
    )
    add("--disp-batches", type=int, default=defaults.disp_batches, help="log the speed every N batches")
    add("--model-prefix", metavar="PREFIX", help="write checkpoints PREFIX-0001.safetensors, …")
    add("--save-period", type=int, default=defaults.save_period, help="epochs between two checkpoints")
    add("--monitor", type=int, default=0, help="log the size of every tensor each N batches; 0: never")
    add("--load-epoch", type=int, metavar="K", help="resume from PREFIX-000K, a checkpoint or .params file of MXNet")
    add("--top-k", type=int, default=0, help="also show the top-k accuracy; 0: only the accuracy")
    add("--loss", default="", help="also show losses: ce, nll_loss")
    add("--test-io", type=int, default=0, help="1: only read the training data, and log the speed")
    add("--dtype", default=defaults.dtype, help=f"{', '.join(DTYPES)}; auto: bfloat16 on a GPU that supports it")
    add("--gc-type", default="none", help="gradient compression; only none")
    add("--gc-threshold", type=float, default=0.5, help="no effect yet")
    add(
        "--macrobatch-size",
        type=int,
        default=0,
        help="lbsgd: sum the gradients of this many samples before each step (rounded up to whole batches)",
    )
    add("--warmup-epochs", type=float, unset="0; lbsgd: 5", help="epochs of warm-up")
    add("--warmup-strategy", default=defaults.warmup_strategy, help="linear, power2, sqrt, constant; lbsgd: lars")
    add("--profile-worker-suffix", default="", help="no effect")
    add("--profile-server-suffix", default="", help="no effect")
    add(
        "--use-imagenet-data-augmentation",
        type=int,
        default=0,
        help="1: crop and recolour at random as is usual for ImageNet; augmentation flags replace single values",
    )


def _add_own_arguments(own: Add, defaults: TrainOptions) -> None:
    own("--devices", unset="those of --gpus", help="devices by name: cpu:4 (four CPU processes), cuda:0,cuda:1")
    own(
        "--optimizer-style",
        choices=OPTIMIZER_STYLES,
        default=defaults.optimizer_style,
        help="whose formulas and defaults the optimizers have that both torch and MXNet have",
    )
    own(
        "--clip-gradient",
        type=float,
        metavar="X",
        unset="no limit",
        help="limit every element of the gradient to -X … X",
    )
    own(
        "--max-grad-norm",
        type=float,
        metavar="X",
        unset="no limit",
        help="scale the gradient of every update down to a norm of X, over all parameters and workers",
    )
    own("--lr-schedule", default=defaults.lr_schedule, help="step, poly, cosine or constant")
    own("--label-smoothing", type=float, default=0.0, help="between 0 and 1")
    own("--mixup", type=float, default=0.0, metavar="ALPHA", help="blend pairs of images (mixup)")
    own(
        "--ema-epochs",
        type=float,
        default=0.0,
        metavar="E",
        help="validate the moving average of the weights over E epochs",
    )
    own(
        "--engine",
        default=defaults.engine,
        help=f"how steps are run: {', '.join(ENGINES)}; auto captures the step on a GPU and compiles it meanwhile",
    )
    own("--staleness", type=int, help="staleness bound of dist_ssync; optional for dist_gsync")
    own(
        "--lr-scale",
        default=defaults.lr_scale,
        help="step of a push in dist_async and dist_ssync: share (scaled by its share of the samples of a round) or "
        "mxnet (not scaled)",
    )
    own("--groups", help="groups of dist_gsync: a file, or ranks such as 0,1,2/3")
    own(
        "--data-allocator",
        type=int,
        unset="2 with servers and eager steps, else 0",
        help="how the data is divided: 0 equally, 1 by the shares in --data-sharding, 2 in leases of a few batches, so "
        "that shares follow the workers' speeds and the samples of a lost worker are trained by others",
    )
    own("--data-sharding", default=defaults.data_sharding, help="file with the shares of the data")
    own(
        "--batch-by-speed",
        action="store_true",
        help="dist_sync: batches in proportion to the workers' speeds, with the same sum, so that steps end together",
    )
    own("--metrics", default="", metavar="NAMES", help=f"also show these, separated by commas: {', '.join(METRICS)}")
    own("--seed", type=int, default=defaults.seed, help="seed of all random numbers")
    own("--resume", choices=("auto", "no"), default="no", help="auto: resume from the newest valid checkpoint")
    own("--save-batches", type=int, default=0, help="also save a checkpoint every N batches; 0: only after epochs")
    own("--tensorboard", metavar="DIR", help="write curves for TensorBoard")
    own("--wandb", metavar="DIR", help="write an offline run of Weights & Biases, without any network")
    own("--eval-every", type=int, default=0, help="also validate every N steps of the lowest rank; 0: after epochs")
    own(
        "--num-val-examples",
        type=int,
        metavar="N",
        help="validate on N examples, always the same random ones (default: all)",
    )
    own("--target-accuracy", type=float, help="stop when the validation accuracy reaches this")
    own("--average-buffers", action="store_true", help="average the BatchNorm statistics of all workers at the end")
    own("--check-finite", action="store_true", help="raise an error for NaN and infinity in gradients")
    own("--push-factors", type=int, default=1, help="0: large linear layers push gradients instead of their factors")
    own("--pace", type=float, default=0.0, metavar="SECONDS", help="minimum duration of a step")
    own("--slow", metavar="RANK:FACTOR", help="multiply --pace for one worker")
    own("--stall", metavar="PROBABILITY:FACTOR", help="multiply --pace for random steps")


def _add_data_arguments(add: Add, own: Add) -> None:
    add("--data-train", unset="the data set's", help=".rec file, or folder with one folder per class")
    add("--data-train-idx", default="", unset="beside it", help=".idx file of --data-train")
    add("--data-val", unset="the data set's", help="validation data, like --data-train")
    add("--data-val-idx", default="", unset="beside it", help=".idx file of --data-val")
    add("--image-shape", unset="the data set's", help="channels,height,width, for example 3,224,224")
    add("--num-classes", type=int, unset="the data set's", help="number of classes")
    add("--num-examples", type=int, unset="all", help="examples per epoch, over all workers")
    add("--data-nthreads", type=int, default=4, help="decoding processes; for small data sets, threads")
    add("--benchmark", type=int, default=0, help="1: train on synthetic data")
    own("--data-dir", default="data", help="folder of the data files")
    own("--skip-bad-records", action="store_true", help="skip and count records that cannot be read")


_AUGMENT: dict[str, tuple[type, str]] = {  # MXNet's flags, by field of AugmentConfig
    "pad_size": (int, "border added on each side"),
    "fill_value": (int, "colour of the border"),
    "random_crop": (int, "1: crop at a random place instead of the centre"),
    "random_mirror": (int, "1: mirror half of the images"),
    "max_random_h": (int, "largest change of hue"),
    "max_random_s": (int, "largest change of saturation in HSL"),
    "max_random_l": (int, "largest change of lightness"),
    "min_random_aspect_ratio": (float, "smallest aspect ratio; without it, --max-random-aspect-ratio is a change of 1"),
    "max_random_aspect_ratio": (float, "largest aspect ratio, or largest change of 1"),
    "max_random_rotate_angle": (int, "in degrees"),
    "max_random_shear_ratio": (float, "largest shear"),
    "max_random_scale": (float, "largest scale"),
    "min_random_scale": (float, "smallest scale"),
    "max_random_area": (float, "largest area of --random-resized-crop"),
    "min_random_area": (float, "smallest area of --random-resized-crop"),
    "min_crop_size": (int, "smallest side of a random crop, which is then resized"),
    "max_crop_size": (int, "largest side of a random crop"),
    "brightness": (float, "largest change of brightness"),
    "contrast": (float, "largest change of contrast"),
    "saturation": (float, "largest change of saturation"),
    "pca_noise": (float, "standard deviation of PCA noise"),
    "random_resized_crop": (int, "1: crop a random area and aspect ratio"),
}


# The values of MXNet's train_imagenet.py, which sets them after it has parsed the flags, so there they have no effect.
_IMAGENET = {
    "rgb_mean": "123.68,116.779,103.939",
    "rgb_std": "58.393,57.12,57.375",
    "random_crop": 0,
    "random_resized_crop": 1,
    "random_mirror": 1,
    "min_random_area": 0.08,
    "min_random_aspect_ratio": 3 / 4,
    "max_random_aspect_ratio": 4 / 3,
    "brightness": 0.4,
    "contrast": 0.4,
    "saturation": 0.4,
    "pca_noise": 0.1,
}


def _add_augment_arguments(add: Add, own: Add) -> None:
    """Add the augmentation flags. Flags that are not given keep the settings of the data set."""
    add("--rgb-mean", unset="the data set's", help="mean per channel, for example 123.68,116.779,103.939")
    add("--rgb-std", unset="the data set's", help="standard deviation per channel, for example 1,1,1")
    for name, (kind, text) in _AUGMENT.items():
        add(f"--{name.replace('_', '-')}", type=kind, unset="the data set's", help=text)
    own("--resize", type=int, unset="the data set's", help="first scale the shorter side of the image to this length")


def options_from(given: argparse.Namespace, data: str) -> TrainOptions:
    """Convert the parsed flags to options; raises UsageError for malformed text. `check_flags` checks the values."""
    values = vars(given) | _imagenet_augmentation(given)
    get = values.get
    slow = parse_slow(given.slow) if given.slow else {}
    stall = parse_stall(given.stall) if given.stall else None
    image_shape = parse_numbers("--image-shape", get("image_shape"), int, 3)
    plain = {name: values[name] for name in TrainOptions.__dataclass_fields__ if values.get(name) is not None}
    return TrainOptions(
        **plain
        | {
            "data": data,
            "image_shape": image_shape,
            "network_options": {"add_stn": True} if get("add_stn") else {},  # only train_mnist.py has this flag
            "momentum": given.mom,
            "weight_decay": given.wd,
            "groups": given.groups or None,
            "data_train_idx": get("data_train_idx") or None,
            "data_val_idx": get("data_val_idx") or None,
            "data_allocator": given.data_allocator,
            "benchmark": bool(get("benchmark")),
            "test_io": bool(given.test_io),
            "push_factors": bool(given.push_factors),
            "resume": given.resume == "auto",
            "save_period": max(1, given.save_period),
            "augment": _augment(values, image_shape[0] if image_shape else 3),
            "devices": tuple(parse_devices(given.gpus, given.devices)),
            "pace": Pace(given.pace, slow, stall, given.seed),
        }
    )


def _imagenet_augmentation(given: argparse.Namespace) -> dict[str, Any]:
    """Return the values that --use-imagenet-data-augmentation 1 sets: those of the flags that were not given."""
    if not given.use_imagenet_data_augmentation or not hasattr(given, "random_crop"):
        return {}
    return {name: value for name, value in _IMAGENET.items() if not was_given(given, name)}


def _augment(values: dict[str, Any], channels: int) -> dict[str, Any]:
    """Return the fields of AugmentConfig that were given."""
    found: dict[str, Any] = {}
    for name in ("rgb_mean", "rgb_std"):
        flag = f"--{name.replace('_', '-')}"
        numbers = parse_numbers(flag, values.get(name), float)
        if numbers is not None:
            found[name] = numbers
            most = max(3, channels)  # commands for grey images often give three numbers
            if len(numbers) > most:
                raise UsageError(
                    f"{flag} {values[name]!r} has {len(numbers)} numbers: give one per channel, at most {most}"
                )
    for name in (*_AUGMENT, "resize"):
        if values.get(name) is not None:
            value = values[name]
            is_switch = name in ("random_crop", "random_mirror", "random_resized_crop")
            found[name] = bool(value) if is_switch else value
    return found


def parse_numbers(flag: str, text: str | None, kind: type, count: int | None = None) -> tuple[Any, ...] | None:
    """Parse numbers separated by commas; with `count`, exactly as many. None if the flag was not given."""
    if not text:
        return None
    try:
        numbers = tuple(kind(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or (count is not None and len(numbers) != count):
        example = (
            "channels,height,width, for example 3,224,224" if count else "numbers, for example 123.68,116.779,103.939"
        )
        raise UsageError(f"{flag} {text!r} is not a list of {example}")
    return numbers
