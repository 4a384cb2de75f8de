"""The names of MXNet's example scripts (1.9.1) for the layers of Echelon's networks.

Most scripts list their layers in the order in which Echelon's networks have them: a function yields the names of the
convolutions and fully connected layers, and batch norm has the name of the convolution before it with one part
replaced. vgg and the residual networks have many depths and name layers by their place; there, patterns rewrite the
path of a module.

`resnet-28-small` is a script of MXNet 0.7. `inception-bn-full` is not here although it is one, too: Echelon's pooling
and batch norm differ from that script's, so its weights would give other outputs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from torch import nn

from echelon.errors import UsageError

# What the tensors of a layer are called: by their name in torch, what follows the layer's name in MXNet.
_WEIGHTS = {"weight": "weight", "bias": "bias"}
_NORM = {"weight": "gamma", "bias": "beta", "running_mean": "moving_mean", "running_var": "moving_var"}

_AUTOMATIC = re.compile(r"(convolution|batchnorm|fullyconnected)(\d+)_.*")

Rules = tuple[tuple[str, str], ...]


def array_names(network: str, model: nn.Module) -> dict[str, str]:
    """Return MXNet's name for every tensor of the model's state, for example `fc1_weight`."""
    return {
        f"{path}.{own}": f"{layer}_{suffix}"
        for path, layer in layer_names(network, model).items()
        for own, suffix in suffixes(model.get_submodule(path)).items()
    }


def suffixes(layer: nn.Module) -> dict[str, str]:
    """Return what follows a layer's name in MXNet's names of its tensors, by their names in torch."""
    if isinstance(layer, nn.BatchNorm2d):
        return _NORM
    return {own: suffix for own, suffix in _WEIGHTS.items() if getattr(layer, own) is not None}


def layer_names(network: str, model: nn.Module) -> dict[str, str]:
    """Return MXNet's name for every layer of the model that has weights, by the layer's path in the model."""
    layers = {path: module for path, module in model.named_modules() if isinstance(module, LAYERS)}
    if network in _BY_PATH:
        return {path: _rewritten(path, _BY_PATH[network]) for path in layers}
    if network not in _IN_ORDER:
        raise UsageError(
            f"the example scripts of MXNet have no network like {network!r}, so the names of its arrays are unknown"
        )
    in_order, norm = _IN_ORDER[network]
    script, found, last = in_order(model), {}, ""
    for path, module in layers.items():
        last = last.replace(*norm) if isinstance(module, nn.BatchNorm2d) else next(script)
        found[path] = last
    return found


def renumbered(names: Iterable[str]) -> dict[str, str]:
    """Return the names with automatic numbers (`convolution7_weight`) that start at 0, by the given name.

    MXNet numbers unnamed layers over the whole process, so the numbers of a second network start higher.
    """
    matches = {name: _AUTOMATIC.fullmatch(name) for name in names}
    lowest: dict[str, int] = {}
    for match in filter(None, matches.values()):
        lowest[match[1]] = min(int(match[2]), lowest.get(match[1], int(match[2])))
    return {
        name: name if match is None else f"{match[1]}{int(match[2]) - lowest[match[1]]}{name[match.end(2) :]}"
        for name, match in matches.items()
    }


def _rewritten(path: str, rules: Rules) -> str:
    for pattern, name in rules:
        if match := re.fullmatch(pattern, path):
            return match.expand(name)
    raise AssertionError(f"no rule names the layer {path}")


_VGG: Rules = (
    (r"features\.group(\d)\.conv(\d)\.conv", r"conv\1_\2"),
    (r"classifier\.fc1", "fc6"),
    (r"classifier\.fc2", "fc7"),
    (r"classifier\.fc", "fc8"),
)
_UNIT = r"features\.stages\.(stage\d)\.(unit\d+)\."
_RESIDUAL: Rules = (
    (r"features\.bn_data", "bn_data"),
    (r"features\.stem\.conv0(?:\.conv)?", "conv0"),
    (r"features\.stem\.(?:norm0|conv0)\.bn", "bn0"),
    (r"classifier\.fc", "fc1"),
)
_RESNET: Rules = (
    *_RESIDUAL,
    (_UNIT + r"activate\.bn", r"\1_\2_bn1"),
    (_UNIT + r"body\.(conv\d)", r"\1_\2_\3"),
    (_UNIT + r"body\.norm(\d)\.bn", r"\1_\2_bn\3"),
    (_UNIT + r"shortcut", r"\1_\2_sc"),
    (r"features\.norm1\.bn", "bn1"),
)
_POST_ACTIVATION: Rules = (
    *_RESIDUAL,
    (_UNIT + r"sum\.body\.conv(\d)\.(conv|bn)", r"\1_\2_\4\3"),
)
_RESNET_V1: Rules = (
    *_POST_ACTIVATION,
    (_UNIT + r"sum\.shortcut\.conv", r"\1_\2_conv1sc"),
    (_UNIT + r"sum\.shortcut\.bn", r"\1_\2_sc"),
)
_RESNEXT: Rules = (
    *_POST_ACTIVATION,
    (_UNIT + r"sum\.shortcut\.conv", r"\1_\2_sc"),
    (_UNIT + r"sum\.shortcut\.bn", r"\1_\2_sc_bn"),
)
_BY_PATH = {"vgg": _VGG, "resnet": _RESNET, "resnet-v1": _RESNET_V1, "resnetv1": _RESNET_V1, "resnext": _RESNEXT}


def _joined(start: str, parts: str) -> Iterator[str]:
    """Yield `start` with each of the words after it."""
    return (start + part for part in parts.split())


def _mlp(_: nn.Module) -> Iterator[str]:
    return _joined("fc", "1 2 3")


def _lenet(model: nn.Module) -> Iterator[str]:
    convolutions = _joined("convolution", "0 1 2 3")
    if any(path.endswith(".stn") for path, _ in model.named_modules()):
        yield from (next(convolutions), next(convolutions), "stn_loc")
    yield from (next(convolutions), next(convolutions), "fullyconnected0", "fullyconnected1")


def _alexnet(_: nn.Module) -> Iterator[str]:
    yield from _joined("conv", "1 2 3 4 5")
    yield from _joined("fc", "1 2 3")


def _googlenet(_: nn.Module) -> Iterator[str]:
    yield from _joined("conv_conv", "1 2 3")
    for block in ["3a", "3b", "4a", "4b", "4c", "4d", "4e", "5a", "5b"]:
        yield from _joined(f"conv_in{block}_", "1x1 3x3_reduce 3x3 5x5_reduce 5x5 proj")
    yield "fullyconnected0"


def _inception_bn(model: nn.Module) -> Iterator[str]:
    if not any(path == "features.conv2red" for path, _ in model.named_modules()):
        return _inception_bn_small(model)
    return _inception_bn_large()


def _inception_bn_large() -> Iterator[str]:
    yield from _joined("conv_", "1 2_red 2")
    for block in ["3a", "3b", "3c", "4a", "4b", "4c", "4d", "4e", "5a", "5b"]:
        shrinks = block in ("3c", "4e")
        yield from () if shrinks else (f"conv_{block}_1x1",)
        yield from _joined(f"conv_{block}_", "3x3_reduce 3x3 double_3x3_reduce double_3x3_0 double_3x3_1")
        yield from () if shrinks else (f"conv_{block}_proj",)
    yield "fullyconnected0"


def _inception_bn_small(_: nn.Module) -> Iterator[str]:
    yield "conv_1"
    for block in ["3a", "3b", "3c", "4a", "4b", "4c", "4d", "4e", "5a", "5b"]:
        yield from _joined(f"conv_in{block}_", "conv" if block in ("3c", "4e") else "1x1 3x3")
    yield "fullyconnected0"


_V3_A = "conv tower_conv tower_conv_1 tower_1_conv tower_1_conv_1 tower_1_conv_2 tower_2_conv"
_V3_B = "conv tower_conv tower_conv_1 tower_conv_2"
_V3_C = (
    "conv tower_conv tower_conv_1 tower_conv_2 "
    "tower_1_conv tower_1_conv_1 tower_1_conv_2 tower_1_conv_3 tower_1_conv_4 tower_2_conv"
)
_V3_D = "tower_conv tower_conv_1 tower_1_conv tower_1_conv_1 tower_1_conv_2 tower_1_conv_3"
_V3_E = (
    "conv tower_conv tower_mixed_conv tower_mixed_conv_1 "
    "tower_1_conv tower_1_conv_1 tower_1_mixed_conv tower_1_mixed_conv_1 tower_2_conv"
)


def _inception_v3(_: nn.Module) -> Iterator[str]:
    yield from (f"{name}_conv2d" for name in ("conv", "conv_1", "conv_2", "conv_3", "conv_4"))
    blocks = (_V3_A, _V3_A, _V3_A, _V3_B, _V3_C, _V3_C, _V3_C, _V3_C, _V3_D, _V3_E, _V3_E)
    for number, block in enumerate(blocks):
        start = f"mixed_{number}_" if number else "mixed_"
        yield from (f"{name}_conv2d" for name in _joined(start, block))
    yield "fc1"


# The kernels in the names of inception-v4. Some are not the kernel of the layer: the script has them so.
_V4_STEM = "3*3 3*3 3*3 3*3 1*1 3*3 1*1 7*1 1*7 3*3 3*3"
_V4_A = "1*1 1*1 1*1 3*3 1*1 3*3 3*3"
_V4_REDUCE_A = "3*3 1*1 3*3 3*3"
_V4_B = "1*1 1*1 1*1 1*7 1*7 1*1 1*7 7*1 1*7 7*1"
_V4_REDUCE_B = "1*1 3*3 1*1 1*7 7*1 3*3"
_V4_C = "1*1 1*1 1*1 3*1 1*3 1*1 1*3 3*1 1*3 3*1"


def _inception_v4(_: nn.Module) -> Iterator[str]:
    blocks = [("in_stem", _V4_STEM), *((f"in{n}A", _V4_A) for n in range(1, 5)), ("re1A", _V4_REDUCE_A)]
    blocks += [*((f"in{n}B", _V4_B) for n in range(1, 8)), ("re1B", _V4_REDUCE_B)]
    blocks += [(f"in{n}C", _V4_C) for n in range(1, 4)]
    for block, kernels in blocks:
        yield from (f"{block}_conv{n}_{kernel}_conv2d" for n, kernel in enumerate(kernels.split(), start=1))
    yield "fc1"


def _numbered(classifier: str) -> Callable[[nn.Module], Iterator[str]]:
    def names(model: nn.Module) -> Iterator[str]:
        convolutions = sum(isinstance(module, nn.Conv2d) for module in model.modules())
        yield from (f"convolution{number}" for number in range(convolutions))
        yield classifier

    return names


def _mobilenet(_: nn.Module) -> Iterator[str]:
    yield "conv_1_conv2d"
    for number in range(2, 15):
        yield from (f"conv_{number}_dw_conv2d", f"conv_{number}_conv2d")
    yield "fc"


def _mobilenetv2(_: nn.Module) -> Iterator[str]:
    yield "first-3x3-conv-conv2d"
    for sequence, blocks in enumerate((1, 2, 3, 4, 3, 3, 1)):
        for block in range(blocks):
            yield from (f"seq-{sequence}-block{block}-{part}-conv2d" for part in ("exp", "depthwise", "linear"))
    yield from ("last-1x1-conv-conv2d", "fc")


# By network: the names in order, and what is replaced in the name of a convolution to name its batch norm.
_IN_ORDER: dict[str, tuple[Callable[[nn.Module], Iterator[str]], tuple[str, str]]] = {
    "mlp": (_mlp, ("", "")),
    "lenet": (_lenet, ("", "")),
    "alexnet": (_alexnet, ("", "")),
    "googlenet": (_googlenet, ("", "")),
    "inception-bn": (_inception_bn, ("conv_", "bn_")),
    "inception-bn-28-small": (_inception_bn_small, ("conv_", "bn_")),
    "inception-v3": (_inception_v3, ("conv2d", "batchnorm")),
    "inception-v4": (_inception_v4, ("conv2d", "batchnorm")),
    "inception-resnet-v2": (_numbered("fullyconnected0"), ("convolution", "batchnorm")),
    "resnet-28-small": (_numbered("fc1"), ("convolution", "batchnorm")),
    "mobilenet": (_mobilenet, ("conv2d", "batchnorm")),
    "mobilenetv2": (_mobilenetv2, ("conv2d", "batchnorm")),
}
LAYERS = (nn.Conv2d, nn.Linear, nn.BatchNorm2d)
