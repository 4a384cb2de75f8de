"""The commands of examples/image-classification/seed_commands.toml train unchanged, in real processes.

The test only appends flags that make them small: --num-examples (which also limits the batch), --num-epochs, and
--devices instead of GPUs. `echelon launch` gets a long --stall-seconds, because on a busy machine it would report slow
workers, and every line that is not the trainers' log fails the test.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.environment import Job
from echelon.train.flags.arguments import options_from
from echelon.train.flags.check import check_flags
from echelon.train.loop.fit import fit
from tiny_data import make_data

EXAMPLES = Path(__file__).parents[2] / "examples" / "image-classification"
LIST: dict[str, Any] = tomllib.loads((EXAMPLES / "seed_commands.toml").read_text())
SWEEP: dict[str, Any] = LIST["sweep"]
LOG = re.compile(r"(?:\[worker (?P<worker>\d)\] )?INFO:root:(?P<text>.*)")
ACCURACY = r"(0\.\d{6}|1\.000000)"


@dataclass(frozen=True)
class Seed:
    """A command of the list. `validates`: it has validation data. `files`: the files in its working directory."""

    name: str
    run: str
    validates: bool = False
    files: dict[str, str] = field(default_factory=dict)

    @property
    def num_workers(self) -> int:
        """The number given by -n."""
        found = re.search(r"launch -n (\d+)", self.run)
        return int(found[1]) if found else 1

    @property
    def num_devices(self) -> int:
        """The number of CPU processes that replace the GPUs."""
        several = re.search(r"--gpus? \d,", self.run) is not None
        return 2 if several else 1

    def scaled(self, data: Path) -> list[str]:
        """The words of the command, scaled down."""
        program = {"python": [sys.executable], "echelon": [sys.executable, "-m", "echelon.cli.main"]}
        here = re.sub(r"--gpus? [\d,]+ ?", "", self.run).replace(" /data/", f" {data}/")
        here = here.replace("echelon launch ", "echelon launch --stall-seconds 60 ")
        words = [part for word in shlex.split(here) for part in program.get(word, [word])]
        words = [str(EXAMPLES / Path(word).name) if word.endswith(".py") else word for word in words]
        examples = 4 * self.num_workers if "imagenet" not in self.name else self.num_devices
        return [*words, "--num-examples", str(examples), "--num-epochs", "1", "--devices", f"cpu:{self.num_devices}"]


COMMANDS = {one["name"]: Seed(**one) for one in LIST["command"]}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("tiny"))


@pytest.mark.long  # ResNet-50 in float16 takes five seconds per image on a CPU
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_runs(name: str, data: Path, tmp_path: Path) -> None:
    command = COMMANDS[name]
    lines = run(command, data, tmp_path)
    for worker in range(command.num_workers):
        message = "\n".join(text for who, text in lines if who == worker)
        validates = command.validates and worker == 0
        assert message.startswith("start with arguments Namespace(data='"), message
        assert re.search(rf"^Epoch\[0\] Train-accuracy={ACCURACY}$", message, re.MULTILINE), message
        assert re.search(r"^Epoch\[0\] Time cost=\d+\.\d{3}$", message, re.MULTILINE), message
        found = re.findall(rf"^Epoch\[0\] Validation-accuracy={ACCURACY}$", message, re.MULTILINE)
        assert len(found) == validates, message
        assert "Epoch[1]" not in message


def run(command: Seed, data: Path, folder: Path) -> list[tuple[int, str]]:
    """Run a command; returns its log as (worker, line). All output must be log lines."""
    (folder / "data").symlink_to(data / "data")
    for name, text in command.files.items():
        (folder / name).write_text(text)
    done = subprocess.run(
        command.scaled(data),
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    found = [LOG.fullmatch(line) for line in done.stdout.splitlines()]
    assert all(found), f"not all of this is the log:\n{done.stdout}"
    return [(int(one["worker"] or 0), one["text"]) for one in found if one is not None]


@pytest.mark.parametrize("row", SWEEP["rows"], ids=lambda row: "-".join(map(str, row)))
def test_a_setting_of_the_sweep_trains(row: list[float], data: Path) -> None:
    """Check the command as written, with all its devices; then run one step in this process."""
    given = dict(zip(SWEEP["columns"], row, strict=True))
    form = SWEEP["run"] if given["num_gpus"] else SWEEP["run"].replace("--gpus {gpus} ", "")
    words = shlex.split(form.format(gpus=",".join(map(str, range(int(given["num_gpus"])))), **given))
    parser = runpy.run_path(str(EXAMPLES / "train_cifar10.py"), run_name="example")["parser"]
    parsed = parser.parse_args(words[2:])
    devices = len((parsed.gpus or "cpu").split(","))
    parsed.gpus = None  # this machine may have none
    options = options_from(parsed, "cifar10")
    assert (options.num_layers, options.batch_size, options.lr) == (given["layers"], given["batch"], given["lr"])
    assert devices == max(1, given["num_gpus"])
    check_flags(parsed, replace(options, devices=("cpu",) * devices), Job())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert fit(replace(options, num_epochs=1, num_examples=2, data_dir=str(data / "data"))) == 0
    finally:
        torch.set_num_threads(threads)
