"""Curves for TensorBoard, behind `--tensorboard DIR`. Its package is an extra, imported only when it is used."""

from __future__ import annotations

from typing import Any

from echelon.errors import UsageError


class Board:
    """Numbers over steps in an event file; without a directory, nowhere. `Board.open` makes one."""

    def __init__(self, writer: Any = None) -> None:
        self._writer = writer

    @classmethod
    def open(cls, directory: str | None) -> Board:
        """A board that writes under `directory`, which is made if needed; None or "": one that drops everything."""
        if not directory:
            return cls()
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UsageError(
                f"--tensorboard {directory} needs what is not installed ({error}); pip install 'echelon[tensorboard]'"
            ) from error
        try:
            return cls(SummaryWriter(directory))
        except OSError as error:
            raise UsageError(f"--tensorboard {directory}: {error.strerror}; give a directory to write to") from error

    def scalar(self, name: str, value: float, step: int) -> None:
        """One point of one curve."""
        if self._writer is not None:
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write out what is left, and end the writer's thread. Points after this are dropped."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
