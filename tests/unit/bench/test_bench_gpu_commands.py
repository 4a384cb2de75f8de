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
    num_devices = len(given.gpus.split(","))
    assert (given.gpus, num_devices) == (("0,0", 2) if row.kind == "cluster" else ("0", 1))
    given.gpus, given.devices = None, f"cpu:{num_devices}"  # this machine may have no GPU
    options = options_from(given, DATA[row.script])
    check_flags(given, options, job_of(row))
    assert options.num_epochs >= max([bar.epochs for bar in row.bars], default=1)
    assert options.engine == ("compile" if row.kind == "speed" else "auto")


def job_of(row: Row) -> Job:
    """Return the numbers of workers and servers of `echelon launch -n N -s M`."""
    words = shlex.split(row.launch)
    return Job(num_workers=int(words[1]), num_servers=int(words[3])) if words else Job(num_workers=1, num_servers=0)
