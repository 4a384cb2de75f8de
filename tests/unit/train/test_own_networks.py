"""Training a user's own network: wrong outputs are reported before the first step, and the check changes no bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from echelon.errors import UsageError
from echelon.train.checkpoint.format import load
from echelon.train.checkpoint.names import path_for
from echelon.train.loop.fit import fit
from echelon.train.recipe.options import TrainOptions

pytestmark = pytest.mark.numeric


class Own(nn.Module):
    """A network with everything that a forward pass changes: random numbers of dropout, statistics, a counter."""

    def __init__(self, num_outputs: int, kind: str) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Dropout(), nn.Linear(64, num_outputs))
        self.kind = kind
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()))

    def forward(self, images: Tensor) -> object:
        if self.training:
            self.count += 1
        logits = self.body(images)
        outputs = {"pair": (logits, logits), "map": logits[..., None, None], "picky": logits, "logits": logits}
        if self.kind == "picky" and len(images) != 8:
            raise RuntimeError(f"this network takes 8 images, not {len(images)}")
        return outputs[self.kind] if self.training else logits


def few(num_classes: int) -> nn.Module:
    return Own(num_classes - 1, "logits")


def many(num_classes: int) -> nn.Module:
    return Own(num_classes + 1, "logits")


def pair(num_classes: int) -> nn.Module:
    return Own(num_classes, "pair")


def maps(num_classes: int) -> nn.Module:
    return Own(num_classes, "map")


def picky(num_classes: int) -> nn.Module:
    return Own(num_classes, "picky")


def right(num_classes: int) -> nn.Module:
    return Own(num_classes, "logits")


def two_steps(network: str, prefix: Path | None = None) -> TrainOptions:
    """Return options for two steps of 8 synthetic images."""
    return TrainOptions(
        benchmark=True,
        image_shape=(1, 8, 8),
        num_classes=10,
        num_examples=16,
        batch_size=8,
        num_epochs=1,
        network=f"{__name__}:{network}",
        model_prefix=str(prefix) if prefix else None,
    )


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ("few", r"returns outputs of shape \(2, 9\) for 2 images, not \(2, 10\), one for each of 10 classes"),
        ("maps", r"returns outputs of shape \(2, 10, 1, 1\) for 2 images, not \(2, 10\)"),
        ("pair", r"returns a tuple in training mode, not a tensor of shape \(2, 10\) for 2 images"),
    ],
)
def test_unsuitable_outputs_are_rejected_before_the_first_step(network: str, message: str) -> None:
    with pytest.raises(UsageError, match=f"^Network '{__name__}:{network}' {message}"):
        fit(two_steps(network))


@pytest.mark.parametrize("network", ["many", "picky", "right"])
def test_unusual_but_valid_outputs_are_trained(network: str) -> None:
    """More outputs than classes are allowed, and a network may require the batch size of the run."""
    assert fit(two_steps(network)) == 0


def test_checking_the_outputs_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(two_steps("right", tmp_path / "looked"))
    monkeypatch.setattr("echelon.models.check_outputs", lambda *_, **__: None)
    fit(two_steps("right", tmp_path / "not"))
    looked, not_looked = (load(path_for(tmp_path / name, 0, 1)) for name in ("looked", "not"))
    assert looked.weights["count"] == 2
    for name, tensor in (not_looked.weights | not_looked.extra).items():
        assert torch.equal((looked.weights | looked.extra)[name], tensor), name
