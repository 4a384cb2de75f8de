"""The shapes of known models have the published counts."""

from __future__ import annotations

import pytest

from echelon.bench.pushpull.shapes import num_elements, shapes
from echelon.errors import UsageError


@pytest.mark.parametrize(
    ("name", "tensors", "elements"),
    [
        ("resnet50", 161, 25_557_032),
        ("resnet18", 62, 11_689_512),
        ("vgg16", 32, 138_357_544),
        ("mlp", 6, 109_386),
        ("keys:3", 3, 3 * 256),
        ("keys:10000:7", 10_000, 70_000),
    ],
)
def test_tensor_and_element_counts(name: str, tensors: int, elements: int) -> None:
    found = shapes(name)
    assert (len(found), num_elements(found)) == (tensors, elements)


def test_the_first_and_last_shapes_of_resnet50() -> None:
    found = shapes("resnet50")
    assert found[:4] == [(64, 3, 7, 7), (64,), (64,), (64, 64, 1, 1)]
    assert found[12] == (256, 64, 1, 1)  # the projection of the first block follows its branch
    assert found[-2:] == [(1000, 2048), (1000,)]


def test_an_unknown_name_lists_the_known_and_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"unknown model 'resnet5'; did you mean 'resnet50'\? Choose .*mlp, keys:N"):
        shapes("resnet5")


@pytest.mark.parametrize("name", ["keys:", "keys:0", "keys:x", "keys:1:-2", "keys:1:2:3"])
def test_malformed_keys_are_rejected(name: str) -> None:
    with pytest.raises(UsageError, match="keys:N"):
        shapes(name)
