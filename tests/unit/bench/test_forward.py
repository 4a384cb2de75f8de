"""The names of benchmark_score.py, and its measurement."""

from __future__ import annotations

import pytest
import torch

from echelon.bench.forward import NETWORKS, TIMED, WARM_UP, parse_name, seconds, speeds
from echelon.errors import UsageError
from echelon.models import names

CPU = torch.device("cpu")


def test_every_network_of_mxnets_script_exists() -> None:
    assert {parse_name(name)[0] for name in NETWORKS} <= set(names())
    assert parse_name("resnet-152") == ("resnet", 152, (3, 224, 224))
    assert parse_name("inception-v3") == ("inception-v3", None, (3, 299, 299))
    assert parse_name("inception-resnet-v2") == ("inception-resnet-v2", None, (3, 224, 224))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("densenet121", "--network densenet121 is in MXNet's Gluon model zoo, but not among Echelon's networks"),
        ("resnet-51", "resnet does not exist with 51 layers"),
        ("lenot", "unknown network 'lenot'; did you mean 'lenet'"),
    ],
)
def test_other_networks_are_rejected(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        list(speeds(name, CPU, [1]))


def test_the_warm_up_is_not_timed() -> None:
    calls: list[bool] = []

    class Counting(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            calls.append(torch.is_inference_mode_enabled())
            return images

    assert seconds(Counting(), torch.zeros(1)) > 0
    assert calls == [True] * (WARM_UP + TIMED)
