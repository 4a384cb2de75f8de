"""Recognises a network, its depth, classes and images by the names and shapes of MXNet's arrays.

What the caller gives has precedence. What cannot be recognised is an error that names the flag that says it. Images
have the size for which the network was designed, because no array depends on it (except where the comparison of shapes
fails later and says so).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from echelon import models
from echelon.errors import UsageError
from echelon.models.layers import Shape

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]

_UNIT = re.compile(r"stage(\d)_unit(\d+)_conv1_weight")
_RESIDUAL = ("resnet", "resnet-v1", "resnetv1", "resnext")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the caller says about a network. None: to be recognised."""

    network: str | None = None
    num_layers: int | None = None
    num_classes: int | None = None
    image_shape: Shape | None = None
    network_options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Network:
    """The arguments of `models.build`."""

    network: str
    num_classes: int
    image_shape: Shape
    num_layers: int | None
    network_options: dict[str, Any]


class Ends(NamedTuple):
    """The weights of the first and the last layer."""

    first: str
    last: str


class _Script(NamedTuple):
    network: str
    marker: str  # an array that only this network has, among those below it
    ends: Ends
    side: int  # of the images for which it is designed


_SCRIPTS = (
    _Script("resnext", "stage1_unit1_sc_bn_gamma", Ends("conv0_weight", "fc1_weight"), 224),
    _Script("resnet-v1", "stage1_unit1_conv1sc_weight", Ends("conv0_weight", "fc1_weight"), 224),
    _Script("resnet", "stage1_unit1_sc_weight", Ends("conv0_weight", "fc1_weight"), 224),
    _Script("vgg", "conv1_1_weight", Ends("conv1_1_weight", "fc8_weight"), 224),
    _Script("googlenet", "conv_conv1_weight", Ends("conv_conv1_weight", "fullyconnected0_weight"), 224),
    _Script("inception-bn", "conv_3a_1x1_weight", Ends("conv_1_weight", "fullyconnected0_weight"), 224),
    _Script("inception-bn", "conv_in3c_conv_weight", Ends("conv_1_weight", "fullyconnected0_weight"), 28),
    _Script("inception-v3", "mixed_conv_conv2d_weight", Ends("conv_conv2d_weight", "fc1_weight"), 299),
    _Script(
        "inception-v4",
        "in_stem_conv1_3*3_conv2d_weight",
        Ends("in_stem_conv1_3*3_conv2d_weight", "fc1_weight"),
        299,
    ),
    _Script(
        "inception-resnet-v2",
        "convolution200_weight",
        Ends("convolution0_weight", "fullyconnected0_weight"),
        299,
    ),
    _Script("resnet-28-small", "convolution20_weight", Ends("convolution0_weight", "fc1_weight"), 28),
    _Script("lenet", "convolution1_weight", Ends("convolution0_weight", "fullyconnected1_weight"), 28),
    _Script("mobilenet", "conv_2_dw_conv2d_weight", Ends("conv_1_conv2d_weight", "fc_weight"), 224),
    _Script(
        "mobilenetv2",
        "first-3x3-conv-conv2d_weight",
        Ends("first-3x3-conv-conv2d_weight", "fc_weight"),
        224,
    ),
    _Script("alexnet", "conv5_weight", Ends("conv1_weight", "fc3_weight"), 224),
    _Script("mlp", "fc3_weight", Ends("fc1_weight", "fc3_weight"), 28),
)


def recognise(shapes: Shapes, wanted: Wanted, graph_ends: Ends | None = None) -> Network:
    """Return the network of these arrays. `graph_ends` is from the symbol file, which knows them whatever the names."""
    if wanted.network is not None:
        models.check_options(wanted.network, wanted.network_options)  # raises for an unknown name
    script = _find_script(shapes, wanted.network)
    network = wanted.network or (script.network if script else None)
    if network is None:
        some = ", ".join(sorted(shapes)[:3])
        raise UsageError(f"the network cannot be recognised by the names of the arrays ({some}, …); give --network")
    ends = graph_ends or (script.ends if script else None)
    missing = [name for name in ends or () if len(shapes.get(name, ())) < 2]
    hint = f", because they have no matrix {missing[0]!r}; check --network" if missing else ""
    ends = None if missing else ends
    num_classes = wanted.num_classes or (shapes[ends.last][0] if ends else None)
    image_shape = wanted.image_shape or (_image_shape(network, shapes, shapes[ends.first], script) if ends else None)
    if num_classes is None or image_shape is None:
        flag = "--image-shape" if image_shape is None and not missing else "--num-classes"
        raise UsageError(
            f"{flag} of the network {network!r} cannot be recognised by the arrays{hint or f'; give {flag}'}"
        )
    depth = wanted.num_layers if wanted.num_layers is not None else _num_layers(network, shapes)
    options = wanted.network_options or (_options(network, shapes, shapes[ends.first]) if ends else {})
    return Network(network, num_classes, image_shape, depth, options)


def _find_script(shapes: Shapes, network: str | None) -> _Script | None:
    """Return the script whose marker is among the arrays. Of a given network, only its scripts count."""
    same = {"resnetv1": "resnet-v1", "inception-bn-28-small": "inception-bn"}
    possible = [one for one in _SCRIPTS if network is None or one.network == same.get(network, network)]
    marked = (one for one in possible if one.marker in shapes)
    return next(marked, possible[0] if network and possible else None)


def _image_shape(network: str, shapes: Shapes, first: tuple[int, ...], script: _Script | None) -> Shape | None:
    if script is None:
        return None
    if network == "mlp":
        return _flat_image(first[1])
    side = script.side
    if network in _RESIDUAL and first[2] == 3:  # the stem of small images
        side = 32 if "stage4_unit1_conv1_weight" in shapes else 28
    return first[1], side, side


def _flat_image(features: int) -> Shape | None:
    """Return the square image with one or three channels that has so many values."""
    for channels in (1, 3):
        side = math.isqrt(features // channels)
        if channels * side * side == features:
            return channels, side, side
    return None


def _num_layers(network: str, shapes: Shapes) -> int | None:
    if network == "vgg":
        return sum(len(shape) == 4 for shape in shapes.values()) + 3
    units = [name for name in shapes if _UNIT.fullmatch(name)]
    if network not in _RESIDUAL or not units:
        return None
    return len(units) * (3 if "stage1_unit1_conv3_weight" in shapes else 2) + 2


def _options(network: str, shapes: Shapes, first: tuple[int, ...]) -> dict[str, Any]:
    """Return the options of the network that differ from the defaults."""
    if network == "lenet" and "stn_loc_weight" in shapes:
        return {"add_stn": True}
    if network in ("mobilenet", "mobilenetv2") and first[0] != 32:
        return {"alpha" if network == "mobilenet" else "multiplier": first[0] / 32}
    grouped = shapes.get("stage1_unit1_conv2_weight", ())
    if network == "resnext" and "stage1_unit1_conv3_weight" in shapes and grouped[0] != 32 * grouped[1]:
        return {"num_group": grouped[0] // grouped[1]}
    return {}
