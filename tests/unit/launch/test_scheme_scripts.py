"""The scripts SCHEME_DATASET_MODEL.sh of the examples are up to date, and Echelon accepts their commands."""

from __future__ import annotations

import os
import runpy
import shlex
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from echelon.cluster.shares import parse_groups, parse_shares
from echelon.train.flags.arguments import options_from

EXAMPLES = Path(__file__).parents[3] / "examples" / "image-classification"
WRITTEN: dict[str, str] = runpy.run_path(str(EXAMPLES / "make_scripts.py"))["scripts"]()
SETS = {"train_mnist.py": "mnist", "train_cifar10.py": "cifar10", "train_imagenet.py": "imagenet"}
SHOW_ARGUMENTS = "#!/bin/sh\nprintf '%s\\0' \"$@\"\n"


@pytest.fixture
def arguments_of(tmp_path: Path) -> Callable[..., list[str]]:
    """Return the arguments that a script gives to `echelon`, by running it with a program of that name."""
    program = tmp_path / "echelon"
    program.write_text(SHOW_ARGUMENTS)
    program.chmod(0o755)

    def run(script: str, *more: str, **variables: str) -> list[str]:
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **variables}
        done = subprocess.run([EXAMPLES / script, *more], env=environment, capture_output=True, check=True, text=True)
        return done.stdout.removesuffix("\0").split("\0")

    return run


def test_scripts_are_up_to_date() -> None:
    found = {path.name: path.read_text() for path in EXAMPLES.glob("*.sh")}
    assert found == WRITTEN, "run: python examples/image-classification/make_scripts.py"
    assert all((EXAMPLES / name).stat().st_mode & stat.S_IXUSR for name in found)


@pytest.mark.parametrize("script", sorted(WRITTEN))
def test_training_accepts_the_flags_of_a_script(script: str, arguments_of: Callable[..., list[str]]) -> None:
    arguments = arguments_of(script)
    start = arguments.index("python")
    launch, program, flags = arguments[:start], arguments[start + 1], arguments[start + 2 :]
    files = " --groups groups --data-sharding data_sharding" if script.startswith("gsp") else ""
    assert launch == shlex.split("launch -n 3 -s 3 -i eth0 --launcher ssh -H hosts" + files)
    parser = runpy.run_path(str(EXAMPLES / program), run_name="example")["parser"]
    options = options_from(parser.parse_args(flags), SETS[program])
    stores = {"bsp": "dist_sync", "asp": "dist_async", "ssp": "dist_ssync", "gsp": "dist_gsync"}
    assert options.kv_store == stores[script[:3]]
    assert (options.staleness is not None) == script.startswith("ssp")
    assert options.data_allocator == script.startswith("gsp")


def test_variables_replace_values_and_arguments_are_appended(arguments_of: Callable[..., list[str]]) -> None:
    arguments = arguments_of(
        "gsp_cifar10_inception_small.sh", "--disp-batches", "5", NUM_EPOCHS="3", GPUS="0,1", HOSTS="my hosts"
    )
    assert arguments[arguments.index("-H") + 1] == "my hosts"
    assert arguments[arguments.index("--num-epochs") + 1] == "3"
    assert arguments[arguments.index("--lr-step-epochs") + 1] == "1,2,3"
    assert arguments[arguments.index("--gpus") + 1] == "0,1"
    assert arguments[-2:] == ["--disp-batches", "5"]


@pytest.mark.parametrize(("allocator", "file"), [("1", ["--data-sharding", "mine"]), ("0", [])])
def test_any_scheme_reads_data_sharding_if_asked(
    arguments_of: Callable[..., list[str]], allocator: str, file: list[str]
) -> None:
    arguments = arguments_of("bsp_mnist_mlp.sh", DATA_ALLOCATOR=allocator, DATA_SHARDING="mine")
    start = arguments.index("python")
    assert arguments[arguments.index("hosts") + 1 : start] == file
    assert arguments[arguments.index("--data-allocator") + 1] == allocator


def test_the_example_files_fit_together() -> None:
    lines = (EXAMPLES / "hosts.example").read_text().splitlines()
    hosts = dict(enumerate(line for line in lines if not line.startswith("#")))
    assert parse_groups((EXAMPLES / "groups.example").read_text(), hosts) == ((0,), (1, 2))
    assert len(parse_shares((EXAMPLES / "data_sharding.example").read_text(), len(hosts))) == len(hosts)
