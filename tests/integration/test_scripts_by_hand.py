"""The example scripts as a user runs them: mistakes, Ctrl-C, a closed pipe, and resuming with other devices.

A mistake causes one line: what is wrong, both values, and what to do. Mistakes are tested in this process; signals and
several devices in real processes.
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
from pathlib import Path

import pytest

from echelon.train import script
from echelon.train.checkpoint.names import find
from jobs import Job, until
from tiny_data import make_data, write_idx

EXAMPLES = Path(__file__).parents[2] / "examples" / "image-classification"
SETS = {"train_mnist": "mnist", "train_cifar10": "cifar10", "train_imagenet": "imagenet"}
MNIST = [sys.executable, str(EXAMPLES / "train_mnist.py")]
FLAGS = shlex.split("--batch-size 8 --loss ce --model-prefix model --lr 0.05")  # 640 images: 80 steps per epoch
RESUME = shlex.split("--disp-batches 1 --num-epochs 2 --resume auto")
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(autouse=True)
def restored_wait_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script lets the waiting threads of its process sleep, and here that is the process of the tests."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(
    ("command", "message"),
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
def test_a_mistake_causes_one_line(data: Path, monkeypatch: pytest.MonkeyPatch, command: str, message: str) -> None:
    monkeypatch.chdir(data)
    name, *arguments = shlex.split(command)
    parser = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="example")["parser"]
    with pytest.raises(SystemExit) as left:
        script.run(parser, SETS[name], arguments)
    line = str(left.value)
    assert line.startswith(f"{parser.prog}: error: ")
    assert message in line
    assert "\n" not in line


@pytest.mark.long
def test_an_error_of_all_devices_is_printed(data: Path) -> None:
    command = [*MNIST, "--devices", "cpu:2", "--load-epoch", "3", "--model-prefix", "no/x"]
    done = subprocess.run(command, cwd=data, env=ONE_THREAD, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    message = done.stdout + done.stderr
    assert "error: there is no checkpoint no/x-0003.safetensors" in message
    assert "Traceback" not in message
    assert message.count("start with arguments") == 1


@pytest.mark.long
def test_a_closed_pipe_ends_all_devices(data: Path) -> None:
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
    """The folder of a run with two devices that Ctrl-C stopped in the middle of an epoch."""
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
def test_ctrl_c_saves_a_checkpoint_of_every_device(interrupted: Path) -> None:
    names = [one.path.name for rank in (0, 1) for one in find(interrupted / "model", rank)[:1]]
    assert len(names) == 2
    assert all(re.fullmatch(r"model(-1)?-\d{4}(-s\d{7})?\.safetensors", name) for name in names), names
    message = (interrupted / "log").read_text()
    assert "Traceback" not in message
    last = ["training stopped: SIGINT", "echelon: stopped by SIGINT"]
    assert [line.removeprefix("INFO:root:") for line in message.splitlines()[-3:]] == [
        f'Saved checkpoint to "{names[0]}"',
        *last,
    ]


def losses(log: str) -> list[float]:
    """Return the cross-entropy of every epoch and every speed line."""
    return [float(value) for value in re.findall(r"cross-entropy=(\d+\.\d+)", log)]


def assert_resumed(interrupted: Path, after: str, samples_per_step: int) -> None:
    """Check that a run continues at the position and with the weights of the interrupted one."""
    epoch, samples = find(interrupted / "model")[0].position
    shown = re.findall(r"Epoch\[(\d+)\] Batch \[(\d+)-", after)
    assert f"Loaded model {find(interrupted / 'model')[0].path.name}" in after
    assert [int(number) for number in shown[0]] == [epoch, samples // samples_per_step]
    first = losses((interrupted / "log").read_text())[0]  # of ten batches
    assert sum(losses(after)[:5]) / 5 < first - 0.05


def copy(interrupted: Path, folder: Path) -> Path:
    (folder / "data").symlink_to(interrupted / "data")
    for path in interrupted.glob("model*"):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.mark.long
def test_one_device_resumes_a_run_of_two(
    interrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.chdir(copy(interrupted, tmp_path))
    parser = runpy.run_path(MNIST[1], run_name="example")["parser"]
    with pytest.raises(SystemExit) as left:
        script.run(parser, "mnist", [*FLAGS, *RESUME])
    assert left.value.code == 0
    assert_resumed(interrupted, caplog.text, 8)


@pytest.mark.long
def test_workers_with_a_server_resume_a_run_of_two_devices(interrupted: Path, tmp_path: Path) -> None:
    command = [*MNIST, *FLAGS, *RESUME, "--kv-store", "dist_sync"]
    with Job(copy(interrupted, tmp_path), num_workers=2, num_servers=1, command=command, environment=ONE_THREAD) as job:
        assert job.wait() == 0, job.out
    assert job.err == ""
    first = "\n".join(line for line in job.out.splitlines() if line.startswith("[worker 0]"))
    assert_resumed(interrupted, first, 16)  # a step has twice the samples; a few may be repeated, none is skipped
