"""The trainers' flags: MXNet's names and defaults, our own beside them, and the options they come to.

MXNet's scripts let a flag be cut short wherever that is unambiguous, and its documents use that (`--gpu 0`,
`--num-epoch 10`). Our additions would make some of those short forms ambiguous, so they give way: a short form that
fits exactly one of MXNet's flags means that one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NoReturn

from echelon.errors import UsageError
from echelon.train.flags.no_effect import Noted
from echelon.train.recipe.options import DTYPES, ENGINES, TrainOptions
from echelon.train.recipe.pace import Pace, parse_slow, parse_stall
from echelon.train.recipe.ranges import check_numbers, check_top_k

Add = Callable[..., Any]

_UNSUPPORTED = {  # accepted, because commands have them; said to be without effect when given
    "profile_worker_suffix": "--profile-worker-suffix",
    "profile_server_suffix": "--profile-server-suffix",
    "use_imagenet_data_augmentation": "--use-imagenet-data-augmentation",
}


class Parser(argparse.ArgumentParser):
    """Raises UsageError instead of leaving, and lets MXNet's flags win where a short form fits several."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.ours: set[str] = set()

    def own(self, *names: str, **settings: Any) -> None:
        """Add a flag that MXNet does not have."""
        self.ours.add(self.add_argument(*names, **settings).dest)

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        found = super()._get_option_tuples(option_string)
        theirs = [match for match in found if match[0] is not None and match[0].dest not in self.ours]
        return theirs if len({match[0].dest for match in theirs}) == 1 else found

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; --help lists the flags")


def add_fit_arguments(parser: argparse.ArgumentParser, own: Add | None = None) -> None:
    """What decides the training itself. Flags of MXNet first; `own` adds those it does not have."""
    own = own or parser.add_argument
    defaults = TrainOptions()
    add = parser.add_argument
    add("--network", default=defaults.network, help="by name, or package.module:function")
    add("--num-layers", type=int, help="depth, for resnet, resnext and vgg")
    add("--gpus", help="GPU ids, 0,2,5; without, the CPU")
    add("--kv-store", default=defaults.kv_store, help="how strictly workers and devices wait for each other")
    add("--num-epochs", type=int, default=defaults.num_epochs)
    add("--lr", type=float, default=defaults.lr, help="learning rate")
    add("--lr-factor", type=float, default=defaults.lr_factor, help="times this at every step")
    add("--lr-step-epochs", action=Noted, default=defaults.lr_step_epochs, help="epochs of the steps, 30,60; or pow2")
    add("--initializer", default=defaults.initializer, help="default, xavier, msra, orthogonal, normal, uniform, …")
    add("--optimizer", default=defaults.optimizer, help="any of MXNet's: sgd, nag, adam, lars, …; and adamw")
    add("--mom", type=float, default=defaults.momentum, help="momentum")
    add("--wd", type=float, default=defaults.weight_decay, help="weight decay")
    add("--batch-size", type=int, default=defaults.batch_size, help="of each worker, over all its devices")
    add("--disp-batches", type=int, default=defaults.disp_batches, help="batches between two lines")
    add("--model-prefix", help="write checkpoints PREFIX-0001.safetensors, …")
    add("--save-period", type=int, default=defaults.save_period, help="epochs between checkpoints")
    add("--monitor", type=int, default=0, metavar="N", help="print every tensor's size each N batches")
    add("--load-epoch", type=int, metavar="K", help="go on from PREFIX-K")
    add("--top-k", type=int, default=0, help="show the top-k accuracy, too")
    add("--loss", default="", help="show losses, too: ce, nll_loss")
    add("--test-io", type=int, default=0, help="1: only read the training data, and show how fast")
    add("--dtype", default=defaults.dtype, help=f"{', '.join(DTYPES)}; auto: bfloat16 on a GPU that has it")
    add("--gc-type", default="none", help="gradient compression (none)")
    add("--gc-threshold", action=Noted, type=float, default=0.5)
    add("--macrobatch-size", action=Noted, type=int, default=0, help="lbsgd: the batch that the warm-up leads to")
    add("--warmup-epochs", type=float, help="epochs of growing learning rate (lbsgd: 5)")
    add("--warmup-strategy", default=defaults.warmup_strategy, help="linear, power2, sqrt, constant; lbsgd: lars")
    add("--profile-worker-suffix", default="", help=argparse.SUPPRESS)
    add("--profile-server-suffix", default="", help=argparse.SUPPRESS)
    add("--use-imagenet-data-augmentation", type=int, default=0, help=argparse.SUPPRESS)
    own("--devices", help="devices by name: cpu:4 (four CPU processes), cuda:0,cuda:1")
    own("--lr-schedule", default=defaults.lr_schedule, help="step, poly, cosine or constant")
    own("--label-smoothing", type=float, default=0.0)
    own("--mixup", type=float, default=0.0, metavar="ALPHA", help="mix pairs of images")
    own("--ema-epochs", type=float, default=0.0, metavar="E", help="validate the weights' average over E epochs")
    own("--engine", default=defaults.engine, help=f"how a step runs: {', '.join(ENGINES)}")
    own("--staleness", type=int, help="bound for dist_ssync, optional for dist_gsync")
    own("--groups", help="for dist_gsync: a groups file, or ranks as 0,1,2/3")
    own("--data-allocator", type=int, default=0, help="1: shares of the data as data_sharding says")
    own("--data-sharding", default=defaults.data_sharding, help="the file of shares")
    own("--seed", type=int, default=defaults.seed)
    own("--resume", choices=("auto", "no"), default="no", help="auto: go on from the newest good checkpoint")
    own("--save-batches", type=int, default=0, metavar="N", help="a checkpoint each N batches, too")
    own("--tensorboard", metavar="DIR", help="write curves for TensorBoard")
    own("--eval-every", type=int, default=0, metavar="N", help="validate every N steps of rank 0, too")
    own("--target-accuracy", type=float, help="stop when the validation accuracy reaches this")
    own("--average-buffers", action="store_true", help="average BatchNorm statistics at the end")
    own("--check-finite", action="store_true", help="refuse NaN and infinity in gradients")
    own("--push-factors", type=int, default=1, help="0: large linear layers push gradients, not their factors")
    own("--pace", type=float, default=0.0, metavar="SECONDS", help="a step lasts at least this long")
    own("--slow", metavar="RANK:FACTOR", help="slow one worker down")
    own("--stall", metavar="PROBABILITY:FACTOR", help="stall steps at random")


def add_data_arguments(parser: argparse.ArgumentParser, own: Add | None = None) -> None:
    """Which data, and of what shape."""
    own = own or parser.add_argument
    add = parser.add_argument
    add("--data-train", help=".rec file or folder of class folders")
    add("--data-train-idx", default="", help="its .idx file")
    add("--data-val", help="validation data")
    add("--data-val-idx", default="")
    add("--image-shape", help="channels,height,width: 3,224,224")
    add("--num-classes", type=int)
    add("--num-examples", type=int, help="examples in an epoch, over all workers")
    add("--data-nthreads", type=int, default=4, help="processes that decode; for small sets, threads")
    add("--benchmark", type=int, default=0, help="1: synthetic data, no files")
    own("--data-dir", default="data", help="where data files are")
    own("--skip-bad-records", action="store_true", help="count and report records that cannot be read, and go on")


_AUGMENT: dict[str, tuple[type, str]] = {  # MXNet's flags by AugmentConfig's fields
    "pad_size": (int, "border added on each side"),
    "fill_value": (int, "its colour"),
    "random_crop": (int, "1: crop at random, not in the middle"),
    "random_mirror": (int, "1: mirror half of the images"),
    "max_random_h": (int, "change of hue"),
    "max_random_s": (int, "change of saturation"),
    "max_random_l": (int, "change of lightness"),
    "min_random_aspect_ratio": (float, ""),
    "max_random_aspect_ratio": (float, ""),
    "max_random_rotate_angle": (int, "degrees"),
    "max_random_shear_ratio": (float, ""),
    "max_random_scale": (float, ""),
    "min_random_scale": (float, ""),
    "max_random_area": (float, ""),
    "min_random_area": (float, ""),
    "min_crop_size": (int, ""),
    "max_crop_size": (int, ""),
    "brightness": (float, ""),
    "contrast": (float, ""),
    "saturation": (float, ""),
    "pca_noise": (float, ""),
    "random_resized_crop": (int, "1: area and aspect ratio at random"),
}


def add_augment_arguments(parser: argparse.ArgumentParser, own: Add | None = None) -> None:
    """What is done to images. A flag that is not given leaves what the dataset's recipe says."""
    own = own or parser.add_argument
    parser.add_argument("--rgb-mean", help="123.68,116.779,103.939")
    parser.add_argument("--rgb-std", help="1,1,1")
    for name, (kind, text) in _AUGMENT.items():
        action = Noted if name.endswith("_random_area") else "store"
        parser.add_argument(f"--{name.replace('_', '-')}", action=action, type=kind, help=text or None)
    own("--resize", type=int, help="shorter side of the image before anything else")


def options_from(given: argparse.Namespace) -> TrainOptions:
    """The run that the flags describe; what is wrong with one of them alone is said here."""
    values = vars(given)
    get = values.get
    for name, flag in _UNSUPPORTED.items():
        if get(name):
            raise UsageError(f"{flag} has no effect in Echelon; leave it out")
    if get("gc_type", "none") != "none":
        raise UsageError(f"--gc-type {given.gc_type}: gradients are not compressed yet; use none")
    check_numbers(values)
    check_top_k(given.top_k)
    _check_prefix(given.model_prefix)
    _one_of("--dtype", given.dtype, DTYPES)
    _one_of("--engine", given.engine, ENGINES)
    _one_of("--data-allocator", str(given.data_allocator), ("0", "1"))
    slow = parse_slow(given.slow) if given.slow else {}
    stall = parse_stall(given.stall) if given.stall else None
    image_shape = _numbers("--image-shape", get("image_shape"), int, 3)
    plain = {name: values[name] for name in TrainOptions.__dataclass_fields__ if values.get(name) is not None}
    return TrainOptions(
        **plain
        | {
            "image_shape": image_shape,
            "momentum": given.mom,
            "weight_decay": given.wd,
            "groups": given.groups or None,
            "data_train_idx": get("data_train_idx") or None,
            "data_val_idx": get("data_val_idx") or None,
            "data_allocator": bool(given.data_allocator),
            "benchmark": bool(get("benchmark")),
            "test_io": bool(given.test_io),
            "push_factors": bool(given.push_factors),
            "resume": given.resume == "auto",
            "save_period": max(1, given.save_period),
            "augment": _augment(values, image_shape[0] if image_shape else 3),
            "devices": tuple(get("device_list") or ("cpu",)),
            "pace": Pace(given.pace, slow, stall, given.seed),
        }
    )


def _augment(values: dict[str, Any], channels: int) -> dict[str, Any]:
    """The fields of AugmentConfig that were given."""
    found: dict[str, Any] = {}
    for name in ("rgb_mean", "rgb_std"):
        flag = f"--{name.replace('_', '-')}"
        numbers = _numbers(flag, values.get(name), float, None)
        if numbers is not None:
            found[name] = numbers
            most = max(3, channels)  # commands for grey images have the three of colours, too
            if len(numbers) > most:
                raise UsageError(
                    f"{flag} {values[name]!r} has {len(numbers)} numbers: give one a channel, {most} at most"
                )
    for name in (*_AUGMENT, "resize"):
        if values.get(name) is not None:
            value = values[name]
            is_switch = name in ("random_crop", "random_mirror", "random_resized_crop")
            found[name] = bool(value) if is_switch else value
    return found


def _numbers(flag: str, text: str | None, kind: type, count: int | None) -> tuple[Any, ...] | None:
    if not text:
        return None
    try:
        numbers = tuple(kind(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or (count is not None and len(numbers) != count):
        form = "channels,height,width, for example 3,224,224" if count else "numbers with commas, for example 1,1,1"
        raise UsageError(f"{flag} {text!r} is not {form}")
    return numbers


def _check_prefix(prefix: str | None) -> None:
    if prefix is not None and (not prefix or prefix.endswith("/")):
        raise UsageError(
            f"--model-prefix {prefix!r} is no beginning of a file's name; add one, for example {prefix}model"
        )


def _one_of(flag: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"{flag} {value!r}: use one of {', '.join(known)}")
