"""A network's own options, from the flag of a script to a checkpoint and back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from echelon.environment import Job
from echelon.errors import UsageError
from echelon.train.checkpoint.format import load
from echelon.train.checkpoint.names import path_for
from echelon.train.loop.fit import fit
from echelon.train.predict import Predictor
from echelon.train.recipe.options import TrainOptions
from echelon.train.script import check, make_parser, read_options


def given(*flags: str) -> TrainOptions:
    """The options of a script with train_mnist.py's flag, on synthetic data."""
    parser = make_parser(None)
    parser.add_argument("--add_stn", action="store_true")
    parser.set_defaults(benchmark=1, image_shape="1,28,28", num_classes=10, num_examples=8, batch_size=8, num_epochs=1)
    return read_options(parser.parse_args(flags), "mnist")


def test_a_flag_of_a_network_is_trained_saved_and_used_again(tmp_path: Path) -> None:
    prefix = str(tmp_path / "m")
    options = given("--network", "lenet", "--add_stn", "--model-prefix", prefix)
    check(options, Job())
    assert fit(options) == 0
    path = path_for(prefix, 0, 1)
    assert load(path).metadata["network_options"] == {"add_stn": True}
    assert "features.stn.affine.weight" in Predictor.load(path).model.state_dict()
    assert fit(replace(options, num_epochs=2, resume=True)) == 0
    with pytest.raises(UsageError, match="network options add_stn=True there, none here"):
        fit(given("--network", "lenet", "--model-prefix", prefix, "--resume", "auto"))


def test_it_is_an_error_before_anything_is_started_where_the_network_has_no_such_option() -> None:
    with pytest.raises(UsageError, match="Network 'mlp' does not accept add_stn"):
        check(given("--network", "mlp", "--add_stn"), Job())
    check(given("--network", "mlp"), Job())
