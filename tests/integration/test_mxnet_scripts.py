"""fine-tune.py and benchmark_score.py with MXNet's flags, as a user runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from echelon import models
from echelon.train.checkpoint.format import Checkpoint, load, save

EXAMPLES = Path(__file__).parents[2] / "examples" / "image-classification"
SHAPE = (3, 12, 12)


def run(script: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / script), *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.long
def test_fine_tune_replaces_only_the_last_layer(tmp_path: Path) -> None:
    """With a learning rate of 0, all weights are those with which training started."""
    old = models.build("mlp", num_classes=10, image_shape=SHAPE).state_dict()
    options = {"rgb_mean": (100.0, 110.0, 120.0), "rgb_std": (50.0, 50.0, 50.0)}
    metadata = {"network": "mlp", "num_classes": 10, "image_shape": SHAPE, "options": options}
    save(tmp_path / "old-0012.safetensors", Checkpoint(old, metadata=metadata))
    for number, name in enumerate(("cat", "dog", "eel")):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for copy in range(2):
            pixels = np.full((14, 14, 3), 60 * number + copy, np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{copy}.png")
    words = "--pretrained-model old --load-epoch 12 --layer-before-fullc flatten0 --data-train photos --num-classes 3"
    done = run("fine-tune.py", tmp_path, *words.split(), "--lr", "0", "--num-epochs", "1", "--model-prefix", "new")
    assert done.returncode == 0, done.stderr
    new = load(tmp_path / "new-0001.safetensors")
    *kept, weight, bias = old
    assert all(torch.equal(new.weights[name], old[name]) for name in kept)
    assert (new.weights[weight].shape[0], new.weights[bias].shape[0]) == (3, 3)
    assert new.metadata["classes"] == ["cat", "dog", "eel"]
    assert new.metadata["options"]["rgb_mean"] == [100.0, 110.0, 120.0]
    assert f"new weights for 3 classes: {bias}, {weight}" in done.stderr
    assert "--layer-before-fullc flatten0 has no effect" in done.stderr


def test_a_missing_pretrained_model_is_one_line(tmp_path: Path) -> None:
    done = run("fine-tune.py", tmp_path, "--pretrained-model", "imagenet1k-resnet-50", "--data-train", "photos")
    assert done.returncode == 1
    assert [line.split(",")[0] for line in done.stderr.splitlines()] == [
        "fine-tune.py: error: there is no file imagenet1k-resnet-50"
    ]


def test_benchmark_score_prints_mxnets_lines(tmp_path: Path) -> None:
    done = run("benchmark_score.py", tmp_path, "--network", "mobilenet", "--batch-size", "2")
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert lines[0] == "INFO:root:network: mobilenet"
    at = lines.index("INFO:root:device: cpu(0)")
    assert re.fullmatch(r"INFO:root:batch size  2, dtype float32, images/sec: \d+\.\d{6}", lines[at + 1])
    assert float(lines[at + 1].split()[-1]) > 0
    assert len(lines) == at + 2
