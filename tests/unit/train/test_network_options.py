"""The options of a network, from the flag of a script to a checkpoint and back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from echelon.environment import Job
from echelon.errors import UsageError
from echelon.train.checkpoint.format import load
from echelon.train.checkpoint.names import path_for
from echelon.train.flags.arguments import options_from
from echelon.train.flags.check import check_flags
from echelon.train.loop.fit import fit
from echelon.train.predict import Predictor
from echelon.train.recipe.options import TrainOptions
from echelon.train.script import make_parser


def checked(*flags: str) -> TrainOptions:
    """Return the checked options of a script with train_mnist.py's flag, on synthetic data."""
    parser = make_parser(None)
    parser.add_argument("--add_stn", action="store_true")
    parser.set_defaults(benchmark=1, image_shape="1,28,28", num_classes=10, num_examples=8, batch_size=8, num_epochs=1)
    given = parser.parse_args(flags)
    options = options_from(given, "mnist")
    check_flags(given, options, Job())
    return options


def test_a_network_option_is_used_in_training_saved_and_loaded(tmp_path: Path) -> None:
    prefix = str(tmp_path / "m")
    options = checked("--network", "lenet", "--add_stn", "--model-prefix", prefix)
    assert fit(options) == 0
    path = path_for(prefix, 0, 1)
    assert load(path).metadata["network_options"] == {"add_stn": True}
    assert "features.stn.affine.weight" in Predictor.load(path).model.state_dict()
    assert fit(replace(options, num_epochs=2, resume=True)) == 0
    with pytest.raises(UsageError, match="network options add_stn=True there, none here"):
        fit(checked("--network", "lenet", "--model-prefix", prefix, "--resume", "auto"))


def test_an_option_that_the_network_does_not_have_is_rejected_before_the_start() -> None:
    with pytest.raises(UsageError, match="Network 'mlp' does not accept add_stn"):
        checked("--network", "mlp", "--add_stn")
    checked("--network", "mlp")
