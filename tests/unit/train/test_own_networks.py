"""Training a user's own network: what is wrong with its outputs is said before a step, and asking changes no bit."""

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


class Own(nn.Module):
    """A network with what a forward pass leaves traces in: dropout's random numbers, statistics, a count."""

    def __init__(self, num_outputs: int, kind: str) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Dropout(), nn.Linear(64, num_outputs))
        self.kind = kind
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


def told(network: str, prefix: Path | None = None) -> TrainOptions:
    """Two steps of 8 synthetic images."""
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
    ("network", "said"),
    [
        ("few", r"returns outputs of shape \(2, 9\) for 2 images, not \(2, 10\), one for each of 10 classes"),
        ("maps", r"returns outputs of shape \(2, 10, 1, 1\) for 2 images, not \(2, 10\)"),
        ("pair", r"returns a tuple in training mode, not a tensor of shape \(2, 10\) for 2 images"),
    ],
)
def test_outputs_that_cannot_be_trained_on_are_refused_at_once(network: str, said: str) -> None:
    with pytest.raises(UsageError, match=f"^Network '{__name__}:{network}' {said}"):
        fit(told(network))


@pytest.mark.parametrize("network", ["many", "picky", "right"])
def test_others_are_trained(network: str) -> None:
    """More outputs than classes do no harm, and a network may take only the batches that it will get."""
    assert fit(told(network)) == 0


def test_the_look_at_the_outputs_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(told("right", tmp_path / "looked"))
    monkeypatch.setattr("echelon.models.check_outputs", lambda *_, **__: None)
    fit(told("right", tmp_path / "not"))
    looked, not_looked = (load(path_for(tmp_path / name, 0, 1)) for name in ("looked", "not"))
    assert looked.weights["count"] == 2
    for name, tensor in (not_looked.weights | not_looked.extra).items():
        assert torch.equal((looked.weights | looked.extra)[name], tensor), name
