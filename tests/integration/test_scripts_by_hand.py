"""What a user of the example scripts runs into: mistakes, Ctrl-C, a pipe that closes, and going on with other devices.

A mistake is one line: what is wrong, both values where there are two, and what to do. Those are made in this process;
what has to do with signals and several devices runs in real ones.
"""

from __future__ import annotations

import logging
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_data import make_data, write_idx

from echelon.train import script
from echelon.train.checkpoint.names import find
from jobs import Job, until

EXAMPLES = Path(__file__).parents[2] / "examples" / "image-classification"
SETS = {"train_mnist": "mnist", "train_cifar10": "cifar10", "train_imagenet": "imagenet"}
MNIST = [sys.executable, str(EXAMPLES / "train_mnist.py")]
FLAGS = shlex.split("--batch-size 8 --loss ce --model-prefix model --lr 0.05")  # 640 images: 80 steps an epoch
GO_ON = shlex.split("--disp-batches 1 --num-epochs 2 --resume auto")
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """For batches this small a second thread only waits for the first, most of all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("train_cifar10 --network resnt", "unknown network 'resnt'; did you mean 'resnet'?"),
        ("train_cifar10 --devices cpu:3", "--batch-size 128 cannot be divided among 3 devices; use 126 or 129"),
        ("train_cifar10 --gpus 0,99", "--gpus 0,99 asks for GPU "),
        ("train_mnist --kv-store dist_snyc", "unknown store 'dist_snyc'; did you mean 'dist_sync'?"),
        ("train_imagenet --data-train no/train.rec", "no record file no/train.rec"),
        ("train_imagenet --network inception-v3 --benchmark 1", "Image shape 3,224,224 is too small"),
        (
            "train_cifar10 --num-layers 51",
            "resnet does not exist with 51 layers for images of height 28; choose from 8, 14",
        ),
        ("train_mnist --kv-store dist_sync", "dist_sync needs a scheduler and servers: start this program with"),
        ("train_mnist --load-epoch 3", "give its prefix: --model-prefix PREFIX"),
        ("train_mnist --load-epoch 3 --model-prefix no/x", "there is no checkpoint no/x-0003.safetensors"),
        ("train_mnist --model-prefix data/cifar10_val.rec/x", "checkpoints cannot be written in "),
    ],
)
def test_a_mistake_is_one_line(data: Path, monkeypatch: pytest.MonkeyPatch, command: str, said: str) -> None:
    monkeypatch.chdir(data)
    name, *arguments = shlex.split(command)
    parser = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="example")["parser"]
    with pytest.raises(SystemExit) as left:
        script.run(parser, SETS[name], arguments)
    line = str(left.value)
    assert line.startswith(f"{parser.prog}: error: ")
    assert said in line
    assert "\n" not in line


def test_an_error_in_every_device_is_said_and_not_twice(data: Path) -> None:
    command = [*MNIST, "--devices", "cpu:2", "--load-epoch", "3", "--model-prefix", "no/x"]
    done = subprocess.run(command, cwd=data, env=ONE_THREAD, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    said = done.stdout + done.stderr
    assert "error: there is no checkpoint no/x-0003.safetensors" in said
    assert "Traceback" not in said
    assert said.count("start with arguments") == 1


@pytest.mark.long
def test_a_pipe_that_closes_ends_all_devices(data: Path) -> None:
    command = [*MNIST, "--devices", "cpu:2", "--num-epochs", "100000"]
    with subprocess.Popen(command, cwd=data, env=ONE_THREAD, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        assert run.stdout.readline().startswith(b"INFO:root:start with arguments")
        run.stdout.close()
        assert run.stderr.read() == b"echelon: stopped, because nobody reads its output any more\n"
        assert run.wait(20) == 128 + signal.SIGPIPE


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with two devices that Ctrl-C ended in the middle of an epoch."""
    folder = tmp_path_factory.mktemp("interrupted")
    (folder / "data").mkdir()
    write_idx(folder / "data", "train", 640)
    write_idx(folder / "data", "t10k", 100)
    command = [*MNIST, *FLAGS, "--devices", "cpu:2", "--num-epochs", "1000", "--disp-batches", "10", "--pace", "0.03"]
    with (folder / "log").open("wb") as log:
        run = subprocess.Popen(command, cwd=folder, env=ONE_THREAD, stdout=log, stderr=subprocess.STDOUT)
    try:
        until(lambda: "Epoch[0] Batch [30-40]" in (folder / "log").read_text(), "training", 60)
        run.send_signal(signal.SIGINT)
        assert run.wait(30) == 128 + signal.SIGINT
    finally:
        run.kill()
        run.wait()
    return folder


@pytest.mark.long
def test_ctrl_c_leaves_a_checkpoint_of_every_device(interrupted: Path) -> None:
    names = [one.path.name for rank in (0, 1) for one in find(interrupted / "model", rank)[:1]]
    assert len(names) == 2
    assert all(re.fullmatch(r"model(-1)?-\d{4}(-b\d{5})?\.safetensors", name) for name in names), names
    said = (interrupted / "log").read_text()
    assert "Traceback" not in said
    last = ["training stopped: SIGINT", "echelon: stopped by SIGINT"]
    assert [line.removeprefix("INFO:root:") for line in said.splitlines()[-3:]] == [
        f'Saved checkpoint to "{names[0]}"',
        *last,
    ]


def losses(log: str) -> list[float]:
    """The cross-entropy of every epoch and every speed line."""
    return [float(value) for value in re.findall(r"cross-entropy=(\d+\.\d+)", log)]


def goes_on(interrupted: Path, after: str, batches_in_one: int) -> None:
    """A run went on from where the interrupted one was, and with what that one had learnt."""
    newest = find(interrupted / "model")[0]
    shown = re.findall(r"Epoch\[(\d+)\] Batch \[(\d+)-", after)
    assert f"Loaded model model_{newest.epoch:04d}.params" in after
    assert [int(number) for number in shown[0]] == [newest.epoch, newest.batch // batches_in_one]
    first = losses((interrupted / "log").read_text())[0]  # of ten batches
    assert sum(losses(after)[:5]) / 5 < first - 0.05


def copy(interrupted: Path, folder: Path) -> Path:
    (folder / "data").symlink_to(interrupted / "data")
    for path in interrupted.glob("model*"):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.mark.long
def test_one_device_goes_on_where_two_were(
    interrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.chdir(copy(interrupted, tmp_path))
    parser = runpy.run_path(MNIST[1], run_name="example")["parser"]
    with pytest.raises(SystemExit) as left:
        script.run(parser, "mnist", [*FLAGS, *GO_ON])
    assert left.value.code == 0
    goes_on(interrupted, caplog.text, 1)


@pytest.mark.long
def test_workers_with_a_server_go_on_where_devices_were(interrupted: Path, tmp_path: Path) -> None:
    command = [*MNIST, *FLAGS, *GO_ON, "--kv-store", "dist_sync"]
    with Job(copy(interrupted, tmp_path), num_workers=2, num_servers=1, command=command, environment=ONE_THREAD) as job:
        assert job.wait() == 0, job.out
    assert job.err == ""
    first = "\n".join(line for line in job.out.splitlines() if line.startswith("[worker 0]"))
    goes_on(interrupted, first, 2)  # a step has twice the samples; a few may be seen again, none is left out
