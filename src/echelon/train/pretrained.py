"""Starts training from a trained network, as `fine-tune.py` does: all weights except those of the last layer are kept.

The network comes from the checkpoint. So do the shape of its images and their mean and std, unless flags replace them.
The last layer is new and has the classes of the data, even if their number is the same. It is found by comparison:
only its shapes depend on the number of classes.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from echelon import models
from echelon.errors import UsageError
from echelon.train.checkpoint.mxnet.recognise import Wanted
from echelon.train.checkpoint.names import load_model
from echelon.train.flags.parser import was_given
from echelon.train.predict import network_of, preprocessing_of
from echelon.train.recipe.options import TrainOptions
from echelon.train.step.average import averaged

log = logging.getLogger(__name__)


def options_for_pretrained(options: TrainOptions, given: Namespace) -> TrainOptions:
    """Return the options of a run that starts from `--pretrained-model`; `--load-epoch` chooses one of its epochs."""
    if not options.pretrained_model:
        raise UsageError(
            "--pretrained-model is missing: give a checkpoint file (or MXNet's .params file), a run folder such as "
            "runs/latest, or a prefix"
        )
    image_shape = options.image_shape if was_given(given, "image_shape") else None
    wanted = Wanted(given.network, given.num_layers, image_shape=image_shape)
    checkpoint, path = load_model(options.pretrained_model, options.load_epoch, wanted)
    found, preprocessing = network_of(checkpoint, path), preprocessing_of(checkpoint, path)
    for name in ("network", "num_layers"):
        wanted, trained = getattr(given, name), getattr(found, name)
        if was_given(given, name) and wanted != trained:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} {wanted}, but {path} has {trained}; leave {flag} out")
    return replace(
        options,
        network=found.network,
        num_layers=found.num_layers,
        network_options=found.network_options,
        image_shape=image_shape or preprocessing.shape,
        augment={"rgb_mean": preprocessing.rgb_mean, "rgb_std": preprocessing.rgb_std} | options.augment,
        pretrained_epoch=options.load_epoch,
        load_epoch=None,
    )


def load_pretrained(
    model: nn.Module, options: TrainOptions, num_classes: int, image_shape: tuple[int, int, int]
) -> None:
    """Copy the weights of `--pretrained-model` into a new network, except for those of its last layer."""
    assert options.pretrained_model is not None
    wanted = Wanted(options.network, options.num_layers, None, options.image_shape, options.network_options)
    checkpoint, path = load_model(options.pretrained_model, options.pretrained_epoch, wanted)
    last = last_layer(options, num_classes, image_shape)
    copy_weights(model, averaged(checkpoint.weights, checkpoint.extra), except_for=last, source=str(path))
    log.info("starting from %s; new weights for %d classes: %s", path, num_classes, ", ".join(sorted(last)))


def last_layer(options: TrainOptions, num_classes: int, image_shape: tuple[int, int, int]) -> set[str]:
    """Return the names of the weights whose shapes depend on the number of classes."""
    with torch.random.fork_rng(devices=[]):  # building draws initial weights, which are not used
        one, other = (
            models.build(
                options.network,
                num_classes=count,
                image_shape=image_shape,
                num_layers=options.num_layers,
                **options.network_options,
            ).state_dict()
            for count in (num_classes, num_classes + 1)
        )
    return {name for name in one if one[name].shape != other[name].shape}


def copy_weights(model: nn.Module, weights: Mapping[str, Tensor], *, except_for: set[str], source: str) -> None:
    """Copy weights and buffers by name. Copies nothing and raises UsageError if one is missing or has another shape."""
    own = {name: tensor for name, tensor in model.state_dict().items() if name not in except_for}
    for name, tensor in own.items():
        shape = tuple(weights[name].shape) if name in weights else "missing"
        if shape != tuple(tensor.shape):
            raise UsageError(
                f"{source} does not fit the network: weight {name} is {shape} there, {tuple(tensor.shape)} here; use "
                "the image shape of the pretrained model (leave --image-shape out)"
            )
    for name, tensor in own.items():
        tensor.copy_(weights[name])
