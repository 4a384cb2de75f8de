"""Curves for experiment trackers: event files of TensorBoard, and offline runs of Weights & Biases.

Both are written to a folder and need no network. `wandb sync` uploads an offline run later, if that is wanted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from echelon.errors import UsageError
from echelon.train.recipe.options import TrainOptions

BY_STEP = "samples/s"  # the only curve over steps; the others are over epochs


class Trackers:
    """Writes curves to all trackers that the options name."""

    def __init__(self, options: TrainOptions) -> None:
        self._writers: list[ScalarWriter | OfflineRun] = [
            ScalarWriter(options.tensorboard),
            OfflineRun(options.wandb, asdict(options)),
        ]

    def write(self, name: str, value: float, step: int) -> None:
        """Add one point to one curve."""
        for writer in self._writers:
            writer.write(name, value, step)

    def close(self) -> None:
        """Flush the files. Later points are dropped."""
        for writer in self._writers:
            writer.close()


class ScalarWriter:
    """Writes scalar curves to a TensorBoard event file; does nothing if no directory was given."""

    def __init__(self, directory: str | None) -> None:
        self._writer = None
        if not directory:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter  # optional, and imported only if used
        except ImportError as error:
            raise UsageError(
                f"--tensorboard {directory} needs a package that is not installed ({error}); "
                "pip install 'echelon[tensorboard]'"
            ) from error
        try:
            self._writer = SummaryWriter(directory)
        except OSError as error:
            raise UsageError(f"--tensorboard {directory}: {error.strerror}; give a writable directory") from error

    def write(self, name: str, value: float, step: int) -> None:
        """Add one point to one curve."""
        if self._writer is not None:
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush the file and stop the writer's thread. Later points are dropped."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class OfflineRun:
    """Writes curves to an offline run of Weights & Biases; does nothing if no directory was given."""

    def __init__(self, directory: str | None, settings: Mapping[str, Any]) -> None:
        self._run: Any = None
        if not directory:
            return
        try:
            import wandb  # optional, and imported only if used
        except ImportError as error:
            raise UsageError(
                f"--wandb {directory} needs a package that is not installed ({error}); pip install 'echelon[wandb]'"
            ) from error
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)  # wandb would use another one without an error
        except OSError as error:
            raise UsageError(f"--wandb {directory}: {error.strerror}; give a writable directory") from error
        self._wandb = wandb
        quiet = wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True, x_disable_stats=True)
        self._run = wandb.init(
            project="echelon", dir=directory, mode="offline", config=dict(settings), settings=quiet, reinit="create_new"
        )
        self._run.define_metric(BY_STEP, step_metric="step")
        for names in ("train/*", "validation/*"):
            self._run.define_metric(names, step_metric="epoch")

    def write(self, name: str, value: float, step: int) -> None:
        """Add one point to one curve."""
        if self._run is not None:
            self._run.log({name: value, "step" if name == BY_STEP else "epoch": step})

    def close(self) -> None:
        """Flush the file and end the client's process. Later points are dropped."""
        if self._run is not None:
            self._run.finish()
            self._wandb.teardown()
            self._run = None
