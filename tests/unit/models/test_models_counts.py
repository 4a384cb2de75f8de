"""Every network has as many parameters, arrays and multiply-adds as MXNet's, by a table of known counts.

Networks are built on the meta device, where size costs neither memory nor time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from echelon import models


class Row(NamedTuple):
    network: str
    num_layers: int | None
    size: int
    num_classes: int
    args: int  # weights, biases, batch-norm scales and offsets
    weights: int  # weights and biases of convolutions and fully connected layers
    norms: int  # batch-norm scales (also the fixed ones) and offsets
    gmac: float | None = None
    weight_arrays: int | None = None
    arrays: int | None = None
    channels: int = 3
    options: dict[str, Any] = {}  # noqa: RUF012

    def __str__(self) -> str:
        return "-".join(map(str, [self.network, self.num_layers or "", self.size, *self.options]))


TABLE = [
    Row("resnet", 20, 28, 10, 272_544, 271_162, 1_382, 0.031, 24, 64),
    Row("resnet", 32, 28, 10, 466_976, 464_698, 2_278, 0.053, 36, 100),
    Row("resnet", 44, 28, 10, 661_408, 658_234, 3_174, 0.075, 48, 136),
    Row("resnet", 56, 28, 10, 855_840, 851_770, 4_070, 0.096, 60, 172),
    Row("resnet", 110, 28, 10, 1_730_784, 1_722_682, 8_102, 0.194, 114, 334),
    Row("resnet", 164, 28, 10, 1_703_264, 1_679_034, 24_230, 0.190, 168, 496),
    Row("resnet", 1001, 28, 10, 10_327_712, 10_178_490, 149_222, None, 1005, 3007),
    Row("resnet", 50, 32, 10, 23_513_168, 23_467_722, 45_446, 1.30, 55, 155),
    Row("resnet", 18, 224, 1000, 11_691_950, 11_684_008, 7_942, 1.83, 23, 61),
    Row("resnet", 34, 224, 1000, 21_800_110, 21_784_744, 15_366, 3.68, 39, 109),
    Row("resnet", 50, 224, 1000, 25_549_486, 25_503_912, 45_574, 4.09, 55, 157),
    Row("resnet", 101, 224, 1000, 44_541_614, 44_443_816, 97_798, 7.80, 106, 310),
    Row("resnet", 152, 224, 1000, 60_185_262, 60_041_384, 143_878, 11.5, 157, 463),
    Row("resnet", 200, 224, 1000, 64_666_286, 64_497_832, 168_454, 15.0, 205, 607),
    Row("resnet", 269, 224, 1000, 102_065_838, 101_820_584, 245_254, 20.0, 274, 814),
    Row("resnet-v1", 18, 224, 1000, 11_693_736, 11_684_008, 9_728, 1.83),
    Row("resnet-v1", 34, 224, 1000, 21_801_896, 21_784_744, 17_152, 3.68),
    Row("resnet-v1", 50, 224, 1000, 25_557_032, 25_503_912, 53_120, 3.86),
    Row("resnet-v1", 101, 224, 1000, 44_549_160, 44_443_816, 105_344, 7.57),
    Row("resnet-v1", 152, 224, 1000, 60_192_808, 60_041_384, 151_424, 11.3),
    Row("resnet-v1", 110, 28, 10, 1_731_002, 1_722_682, 8_320, 0.194, 114, 338),
    Row("resnext", 50, 224, 1000, 25_028_910, 24_960_680, 68_230, 4.23, 55, 163),
    Row("resnext", 101, 224, 1000, 44_177_710, 44_039_848, 137_862, 7.97, 106, 316),
    Row("resnext", 152, 224, 1000, 59_951_406, 59_752_104, 199_302, 11.7, 157, 469),
    Row("resnext", 101, 224, 1000, 42_843_694, 42_705_832, 137_862, 7.73, 106, 316, options={"num_group": 64}),
    Row("alexnet", None, 224, 1000, 50_844_008, 50_844_008, 0, 1.01, 16, 16),
    Row("vgg", 11, 224, 1000, 132_863_336, 132_863_336, 0, 7.6, 22, 22),
    Row("vgg", 13, 224, 1000, 133_047_848, 133_047_848, 0, 11.3, 26, 26),
    Row("vgg", 16, 224, 1000, 138_357_544, 138_357_544, 0, 15.5, 32, 32),
    Row("vgg", 19, 224, 1000, 143_667_240, 143_667_240, 0, 19.6, 38, 38),
    Row("vgg", None, 224, 1000, 132_863_336, 132_863_336, 0, 7.61, 22, 22),
    Row("googlenet", None, 224, 1000, 6_998_552, 6_998_552, 0, 1.43, 116, 116),
    Row("inception-bn", None, 224, 1000, 11_295_240, 11_275_208, 20_032, 1.99, 140, 278),
    Row("inception-bn", None, 28, 10, 1_652_826, 1_649_402, 3_424, 0.204, 40, 78),
    Row("inception-bn-28-small", None, 28, 10, 1_652_826, 1_649_402, 3_424, 0.204, 40, 78),
    Row("inception-v3", None, 299, 1000, 23_834_568, 23_800_136, 34_432, 5.71, 96, 284),
    Row("inception-v4", None, 299, 1000, 54_967_816, 54_904_648, 63_168, 12.3, 151, 449),
    Row("inception-resnet-v2", None, 299, 1000, 56_009_476, 55_857_372, 152_104, 13.2, 490, 978),
    Row("inception-resnet-v2", None, 224, 1000, 56_009_476, 55_857_372, 152_104, 6.5, 490, 978),
    Row("mobilenet", None, 224, 1000, 4_231_976, 4_210_088, 21_888, 0.569, 29, 83),
    Row("mobilenetv2", None, 224, 1000, 3_505_960, 3_471_784, 34_176, 0.314, 55, 161),
    Row("mlp", None, 28, 10, 109_386, 109_386, 0, 0.0001, 6, 6, channels=1),
    Row("lenet", None, 28, 10, 431_080, 431_080, 0, 0.002, 8, 8, channels=1),
    Row("lenet", None, 28, 10, 448_486, 448_486, 0, None, 14, 14, channels=1, options={"add_stn": True}),
    # From MXNet 0.7, where pooling rounds up, so that multiply-adds differ.
    Row("inception-bn-full", None, 224, 21841, 33_619_969, 33_598_369, 21_600, None, 140, 278),
    Row("resnet-28-small", None, 28, 10, 273_258, 271_690, 1_568, 0.031, 44, 86),
]


def _build(row: Row) -> nn.Module:
    shape = (row.channels, row.size, row.size)
    with torch.device("meta"):
        return models.build(
            row.network, num_classes=row.num_classes, image_shape=shape, num_layers=row.num_layers, **row.options
        )


def _gmac(model: nn.Module, row: Row) -> float:
    """Return the multiply-adds of convolutions and fully connected layers in one forward pass, in 10^9."""
    macs = []

    def count(module: nn.Module, _: object, output: Tensor) -> None:
        macs.append(output.numel() * module.get_parameter("weight")[0].numel())

    for module in list(model.modules()):
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(count)
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, nn.Identity())  # slow on the meta device, and not counted
    with torch.no_grad():
        output = model(torch.empty(1, row.channels, row.size, row.size, device="meta"))
    assert output.shape == (1, row.num_classes)
    return sum(macs) / 1e9


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_counts_equal_those_of_mxnet(row: Row) -> None:
    model = _build(row)
    norms = [p for m in model.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters()]
    arrays = list(model.parameters())
    num_args, num_norms = sum(p.numel() for p in arrays), sum(p.numel() for p in norms)
    assert (num_args, num_args - num_norms, num_norms) == (row.args, row.weights, row.norms)
    if row.arrays is not None:
        assert (len(arrays) - len(norms), len(arrays)) == (row.weight_arrays, row.arrays)
    if row.gmac is not None:
        assert _gmac(model, row) == pytest.approx(row.gmac, rel=0.02, abs=1e-3 if row.gmac < 0.01 else 6e-4)


def test_every_network_is_in_the_table() -> None:
    assert set(models.names()) - {row.network for row in TABLE} == {"digits-cnn", "resnetv1"}


@pytest.mark.parametrize(
    ("network", "eps", "num_fixed"), [("resnet", 2e-5, 1), ("resnet-v1", 2e-5, 0), ("resnext", 2e-5, 1)]
)
def test_residual_networks_fix_only_the_input_scale(network: str, eps: float, num_fixed: int) -> None:
    with torch.device("meta"):
        model = models.build(network, num_classes=10, image_shape=(3, 28, 28), num_layers=20)
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert {m.eps for m in norms} == {eps}
    assert {m.momentum for m in norms} == {0.1}
    assert sum(not m.weight.requires_grad for m in norms) == num_fixed


@pytest.mark.parametrize(
    ("network", "size", "eps", "fixed"),
    [
        ("inception-bn", 28, 1e-5 + 1e-10, False),
        ("inception-v3", 299, 1e-3, True),
        ("inception-v4", 299, 1e-3, True),
        ("inception-resnet-v2", 299, 1e-3, True),
        ("mobilenet", 224, 1e-3, True),
        ("mobilenetv2", 224, 1e-5, False),
    ],
)
def test_batch_norm_settings_of_each_family(network: str, size: int, eps: float, fixed: bool) -> None:
    with torch.device("meta"):
        model = models.build(network, num_classes=10, image_shape=(3, size, size))
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert {(m.eps, m.weight.requires_grad) for m in norms} == {(eps, not fixed)}
