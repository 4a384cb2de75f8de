"""Training on a data set large enough for decoding processes: stopped by a signal, and resumed."""

from __future__ import annotations

import io
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from echelon.data.loading.sources import MANY
from echelon.data.records import Header, IndexedWriter, pack
from echelon.train.checkpoint.names import find
from jobs import until

SCRIPT = Path(__file__).parents[2] / "examples" / "image-classification" / "train_imagenet.py"
FLAGS = shlex.split(
    "--data-train many.rec --data-val many.rec --image-shape 3,8,8 --num-classes 5 --network mlp --batch-size 50 "
    f"--num-examples {MANY} --data-nthreads 2 --random-resized-crop 1 --random-crop 0 --lr 1e-5 --model-prefix model "
    "--disp-batches 2 --resume auto --min-random-scale 1 --max-random-scale 1"
)


def write_many(path: Path) -> None:
    encoded = []
    for number in range(5):
        file = io.BytesIO()
        pixels = np.random.default_rng(number).integers(0, 256, (12, 12, 3), np.uint8)
        Image.fromarray(pixels).save(file, "JPEG")
        encoded.append(file.getvalue())
    with IndexedWriter(path) as writer:
        for number in range(MANY):
            writer.write(number, pack(Header(float(number % 5), number), encoded[number % 5]))


def start(folder: Path, *more: str) -> subprocess.Popen[bytes]:
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, str(SCRIPT), *FLAGS, *more],
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@pytest.mark.long
def test_a_signal_to_all_processes_saves_and_exits_and_the_run_can_be_resumed(tmp_path: Path) -> None:
    write_many(tmp_path / "many.rec")
    message = tmp_path / "log"
    run = start(tmp_path, "--num-epochs", "1000", "--pace", "0.05")
    try:
        until(lambda: "Epoch[0] Batch [2-4]" in message.read_text(), "training", 60)
        children = psutil.Process(run.pid).children(recursive=True)
        assert len(children) == 3  # the fork server and two decoding processes
        os.killpg(run.pid, signal.SIGTERM)
        assert run.wait(30) == 128 + signal.SIGTERM
    finally:
        run.kill()
        run.wait()
    assert not psutil.wait_procs(children, 30)[1]
    log = message.read_text()
    assert "Traceback" not in log
    saved = find(tmp_path / "model")[0]
    assert log.endswith(f'Saved checkpoint to "{saved.path.name}"\nINFO:root:training stopped: SIGTERM\n')
    assert saved.position > (0, 2)
    epoch = saved.position[0]
    on = start(tmp_path, "--num-epochs", str(epoch + 1))
    assert on.wait(60) == 0
    assert re.search(rf"Epoch\[{epoch}\] Validation-accuracy=", message.read_text())
