"""The trainers accept every command of the GPU list, so that a typing error costs no time on a GPU."""

from __future__ import annotations

import runpy
import shlex

import pytest

from benchmarks.gpu.__main__ import ROOT
from benchmarks.gpu.rows import Row, gpu_rows
from echelon.environment import Job
from echelon.train.flags.arguments import options_from
from echelon.train.flags.check import check_flags

EXAMPLES = ROOT / "examples" / "image-classification"
DATA = {"train_imagenet.py": "imagenet", "train_cifar10.py": "cifar10"}


@pytest.mark.parametrize("row", gpu_rows(), ids=lambda row: row.name)
def test_the_trainer_accepts_the_command(row: Row) -> None:
    parser = runpy.run_path(str(EXAMPLES / row.script), run_name="example")["parser"]
    given = parser.parse_args(shlex.split(row.arguments))
    assert given.gpus == "0"
    given.gpus = None  # this machine may have no GPU
    options = options_from(given, DATA[row.script])
    check_flags(given, options, Job(num_workers=1, num_servers=1 if row.launch else 0))
    assert options.num_epochs >= max([bar.epochs for bar in row.bars], default=1)
    assert options.engine == ("compile" if row.kind == "speed" else "auto")
