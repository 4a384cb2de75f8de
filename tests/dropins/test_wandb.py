"""--wandb with the real client, in a network namespace of its own where that is allowed: no network is needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.dropins

PROGRAM = """
import sys
from dataclasses import replace
from echelon.train.loop.fit import fit
from echelon.train.recipe.options import TrainOptions
sys.exit(fit(TrainOptions(data="digits", network="mlp", kv_store="local", num_epochs=2, wandb=sys.argv[1])))
"""


def test_an_offline_run_has_the_curves_and_the_settings(tmp_path: Path) -> None:
    folder = tmp_path / "curves"
    alone = ["unshare", "--net"] if subprocess.run(["unshare", "--net", "true"], check=False).returncode == 0 else []
    command = [*alone, sys.executable, "-c", PROGRAM, str(folder)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    (written,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    data = written.read_bytes()  # protocol buffers, whose texts are plain
    for name in (b"samples/s", b"train/accuracy", b"validation/accuracy", b"epoch", b"num_epochs"):
        assert name in data, name
